"""The figures of a run's report, in their order.

The first one stands at the head of the page. Those that answer none of its questions are folded to a sentence each.
"""

from __future__ import annotations

from ..content import Figure
from . import barriers, breakdown, budget, device, files, gantt, heatmap, restart, steps, throughput, waterfall

FIGURES: tuple[Figure, ...] = (
    Figure(
        "restart",
        "Restart",
        "The restart over all ranks",
        restart.draw,
        "What each rank did from the failure, or the start of the first process, to its first step, phase by phase; "
        "the line is the critical path, which goes on with the rank that was waited for.",
        ("critical path", "restart", "time to first step"),
    ),
    Figure(
        "budget",
        "Budget",
        "What the run's wall time went to",
        budget.draw,
        "The wall time of all cycles in parts that follow one another without a gap, each cycle told on one rank. "
        "Wasted is training that a restart undid, and what came after the last step until the failure; other is "
        "what no part accounts for: evaluation, the wait for the last save, shutting down.",
        ("goodput", "blocked time", "wasted", "restart"),
    ),
    Figure(
        "waterfall",
        "Waterfall",
        "Restart, from the failure to the first step",
        waterfall.draw,
        "Phases one after the other on the critical rank, in which a rank also waits for others; they add up to "
        "the restart's length. The grey bar behind a phase reaches from the first rank that began it to the last "
        "that ended it. What comes after the dotted line is training again work that was lost.",
        ("critical rank", "critical path", "restart", "time to first step", "caught up", "lost work"),
    ),
    Figure(
        "breakdown",
        "Phases",
        "Where saves, loads and starts spend their time",
        breakdown.draw,
        "Busy time of each phase. First one after the other on three ranks, the critical rank on top: what "
        "training waited for apart from what went on in the background. Then over all ranks: a bar from the "
        "fastest to the slowest rank, a line at the median. The rest that no phase accounts for is shown as "
        "unattributed.",
        ("critical rank", "busy time", "slowest rank", "wall time", "unattributed", "coverage"),
        folded=True,
    ),
    Figure(
        "ranks",
        "Ranks",
        "Rank by rank",
        heatmap.draw,
        "Busy time of each rank (column) in each phase (row); a triangle marks ranks whose own time is far "
        "above the median's (the thresholds of the finding straggling_rank). The buttons order the ranks by "
        "host, or by pipeline stage, data-parallel and tensor-parallel rank. In the row of barriers a dark "
        "cell is a rank that others waited for.",
        ("busy time", "own time", "slowest rank"),
        folded=True,
    ),
    Figure(
        "timeline",
        "Timeline",
        "One checkpoint as it happened",
        gantt.draw,
        "Every span of the save on the threads of its critical, its median and its fastest rank (of at most "
        "four ranks: of all), with the training steps of the rank below. Spans that alternate within one "
        "window share the height of their lane; hover for the time that each really took.",
        ("operation", "wall time", "blocked time", "durable"),
        folded=True,
    ),
    Figure(
        "files",
        "Files",
        "Files of the checkpoint",
        files.draw,
        "Files that ranks wrote (without the manifest): how many of which size, and the time that each took "
        "in write and fsync, or in reading and decoding, by the kind that its name shows.",
        ("I/O throughput",),
        folded=True,
    ),
    Figure(
        "throughput",
        "Throughput",
        "Throughput of saves and loads",
        throughput.draw,
        "Two numbers that are often confused: io_GBps is what the storage took, blocked_GBps is the "
        "checkpoint's size over the time that training stood still. A rank's are its own bytes over its own "
        "time; a host's are its ranks' bytes over the time of its slowest rank.",
        ("I/O throughput", "blocked time", "slowest rank"),
        folded=True,
    ),
    Figure(
        "barriers",
        "Barriers",
        "Waiting for other ranks",
        barriers.draw,
        "Time of each rank in barriers. A low bar among high ones is a rank that came late.",
        ("waiting",),
        folded=True,
    ),
    Figure(
        "steps",
        "Training steps",
        "Training steps around checkpoints",
        steps.draw,
        "Time of every training step on its slowest rank. Rings mark steps during which a save was under "
        "way: what they take above the others is the price of saving in the background.",
        ("step", "blocked time"),
        folded=True,
    ),
    Figure(
        "probes",
        "Memory and devices",
        "Memory, page cache, I/O and devices",
        device.draw,
        "The highest value over the ranks at the start and the end of each operation, and by how much the "
        "I/O counters of the processes rose in it. Reads that were fetched from storage less than they were "
        "read came from the page cache. With --restart-trace-probes-interval also the throughput of PCIe, "
        "NVLink and storage while the save ran.",
        ("probe", "operation"),
        folded=True,
    ),
)
