"""The project's words, each defined once: the page of a report and docs/glossary.md show these definitions.

JSON keys, table heads and labels of pages are composed of `names`; a test compares the outputs of the commands with
them. docs/glossary.md is printed by `python -m tests.golden.glossary_page`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...common.formatting import listed
from .phase_kinds import AFTERWARDS, SYNCHRONISING, WAITING


class Entry(NamedTuple):
    """A term. `names`: the words for it in keys, heads and labels; `see`: the page with more."""

    term: str
    definition: str
    names: tuple[str, ...] = ()
    unit: str = ""
    see: str = ""


def _names(phases: Sequence[str]) -> str:
    return listed([f"`{phase}`" for phase in phases])


ENTRIES: tuple[Entry, ...] = (
    Entry("run", "One training from its first iteration to its end, over all its cycles.", ("run",)),
    Entry(
        "cycle",
        "One start of all ranks of a run and what follows until they end, numbered from 0; a restart in place begins "
        "one, too (the word of NVIDIA's ft_launcher; an attempt is a scheduler's).",
        ("cycle",),
    ),
    Entry(
        "launch",
        "A start of a cycle that begins the training, `launch_s` its time to the first step; others are restarts.",
        ("launch", "launches", "launching", "start"),
    ),
    Entry(
        "restart",
        "A start of a cycle after 0, or of cycle 0 from a checkpoint; its time, `restart_s`, is from the failure "
        "(`injected`, else `detected`) to the end of the last rank's first step, and null where no supervisor "
        "recorded the failure; after an in-process one a rank has returned, in the process that was there, or is new.",
        ("restart", "restarting", "return", "returned", "new"),
        "s",
    ),
    Entry(
        "time to first step",
        "Start of the process (in the OS; of `megatron.launch`, where that imported everything for this start; of a "
        "rank that returns its `abort`) to the end of its `first_step` span, of the slowest rank.",
        ("time to first step", "to first step"),
        "s",
    ),
    Entry(
        "caught up",
        "Training has passed the last iteration that was finished before the failure; the time is counted from the "
        "failure, or from the start of the process.",
        ("caught up",),
        "s",
    ),
    Entry("rank", "One process of the training, with its coordinates (tp, pp, dp).", ("rank", "tp pp dp")),
    Entry("layout", "The sizes TP x PP x DP: tensor, pipeline and data parallelism.", ("layout",)),
    Entry(
        "step",
        "One iteration of training, an optimizer step over the global batch; a step during a save is one of which a "
        "save of the same rank was under way for some part, on any rank.",
        ("step", "iteration"),
    ),
    Entry(
        "checkpoint",
        "The directory `global_stepN`, its tag, with the files of all ranks and a manifest; it is complete if all "
        "files of the manifest are there with their sizes, and damaged if a load cannot use it.",
        ("checkpoint", "tag"),
    ),
    Entry(
        "engine",
        "The checkpoint engine, which makes files of a rank's state and reads them again; an asynchronous one writes "
        "while training goes on (DeepSpeed's engine is `ds_engine`).",
        ("engine",),
        see="engines.md",
    ),
    Entry(
        "committed",
        "Rank 0 has written the manifest and published the checkpoint, after all ranks agreed that their files are "
        "written; the time is from the first rank's start of the save, null if it failed.",
        ("committed",),
        "s",
    ),
    Entry(
        "durable",
        "Committed, with every file and directory fsynced first: some rank states `durable` true and none false.",
        ("durable", "durability"),
        "s",
    ),
    Entry("reshard", "To load a checkpoint onto a layout other than the one that saved it.", see="resuming.md"),
    Entry(
        "trace",
        "The records of all processes of a run, a JSONL file for each; the trainer writes it, or hooks in other "
        "programs.",
        ("trace",),
        see="log_format.md",
    ),
    Entry(
        "operation",
        "One save, load or start-up over all its ranks: the n-th save of a tag in a cycle on each rank, or the n-th "
        "load, which may pass over damaged checkpoints.",
        ("operation", "save", "saving", "load", "startup"),
    ),
    Entry(
        "span",
        "A window of time that one thread spent in one phase of an operation; it is blocking if the training thread "
        "waited for it.",
        ("span", "blocking"),
    ),
    Entry(
        "phase",
        "What the time of an operation was spent on, with a detail for some.",
        ("phase", "detail", "part"),
        see="log_format.md#phases",
    ),
    Entry(
        "probe",
        "A sample that a rank takes of itself, its host and its device just before an operation and just after it; in "
        "between with `--restart-trace-probes-interval`.",
        ("probe",),
    ),
    Entry(
        "supervisor",
        "The program that watches a job and restarts it; it records the failures, with rank -1.",
        ("failure", "fault", "detected", "stopped", "relaunched", "detect", "stop", "relaunch", "launcher"),
    ),
    Entry(
        "wall time",
        "End minus start, however many threads worked; of a start it ends with `first_step`.",
        ("wall",),
        "s",
    ),
    Entry(
        "slowest rank",
        "Between ranks a duration is the slowest rank's (of equals the lowest) and a throughput is total bytes over "
        "that; a rank that spent no time in a phase counts as 0.",
    ),
    Entry(
        "busy time",
        "Of spans on a rank: each cluster of overlapping windows gives the sum of their `duration_ns`, at most its "
        "length; so phases that alternate in one window count what each took, and parallel threads count once.",
        ("busy", "took"),
        "s",
    ),
    Entry(
        "own time",
        f"Busy time of a rank in the phases in which it waits for no other: all but {_names(WAITING)}, and what "
        f"follows an operation ({_names(AFTERWARDS)}).",
        ("own",),
        "s",
    ),
    Entry(
        "waiting",
        f"Time of a rank in a phase in which ranks meet ({_names(SYNCHRONISING)}) until "
        "the last has come: all leave their n-th `barrier` of an operation together, so who waits least there, or has "
        "no such span, was waited for; skew is the longest less the shortest wait in it.",
        ("wait", "waited for", "waiting", "skew"),
        "s",
    ),
    Entry(
        "critical path",
        "The chain across ranks that decides when an operation ends: back from its end on a rank, innermost span "
        "first, and on with the rank that came last wherever none leaves before all have come.",
        ("path",),
    ),
    Entry(
        "critical rank",
        "The rank for which the others waited, not the one with the longest wall time: it is longest on the critical "
        f"path outside of {_names(SYNCHRONISING)}; most of that is its critical phase.",
        ("critical",),
    ),
    Entry(
        "coverage",
        "Busy time of all spans of a rank, cut to the operation, over its wall time; of an operation the lowest of "
        "the ranks that finished.",
        ("coverage",),
        "share",
    ),
    Entry(
        "unattributed",
        "Wall time of an operation that no span covers, of the rank where it is largest; it is never spread over the "
        "phases.",
        ("unattributed",),
        "s",
    ),
    Entry(
        "blocked time",
        "Union of a save's blocking spans, but for waits of a load or of the end of training, on the rank where it is "
        "largest: by how much the save held training up.",
        ("blocked",),
        "s",
    ),
    Entry(
        "blocked share",
        "Blocked time of all saves over training time: from the first to the last step of each cycle, and what saves "
        "after that blocked; of an imported log over its log intervals.",
        unit="share",
    ),
    Entry(
        "I/O throughput",
        "Bytes written or read over the slowest rank's time in `flush` (fsync included) or `read`, through the page "
        "cache unless the engine goes around it; blocked throughput is the bytes over blocked time.",
        ("io", "throughput"),
        "GB/s",
    ),
    Entry(
        "lost work",
        "Lost steps are those between the checkpoint that a restart loaded and the last step before it; lost work is "
        "their time as first trained, on the rank that spent most.",
        ("lost work", "lost steps"),
        "s",
    ),
    Entry(
        "wasted",
        "The part of a run's wall time that failures undid: steps that were trained again (lost work), and the time "
        "from the last step or save to the failure.",
        ("wasted",),
        "s",
    ),
    Entry(
        "goodput",
        "Training that counts over wall time: of a run `training_s` over `wall_s` of its budget, of a projection what "
        "is expected; others define it otherwise.",
        ("goodput", "training", "budget"),
        "share",
        "metrics.md#goodput-of-others",
    ),
    Entry(
        "speed-up",
        "Value of the first run over that of another, of throughputs the inverse: above 1 the other is better; saves "
        "and restarts count with their medians.",
        ("speed up",),
    ),
    Entry(
        "verdict",
        "Which run or engine takes the least time, where a difference exceeds the noise; otherwise no difference is "
        "shown.",
        ("verdict",),
        see="comparing.md#whether-they-differ",
    ),
    Entry(
        "finding",
        "A cause of lost time with its evidence, its cost and a remedy; it changes no exit status.",
        ("finding",),
        see="findings.md",
    ),
    Entry(
        "problem",
        "Missing, invalid or contradictory data, or a failed operation; with `--strict` the exit status is 1.",
        ("problem",),
        see="metrics.md#problems",
    ),
    Entry("straggler", "A rank or host whose own time is far above the median's.", see="findings.md"),
)
# Words of titles and axes that need no definition: plain English, and what every engineer takes to mean one thing. A
# term that others define otherwise, or that a key or head of a table has, gets an entry instead.
ORDINARY = (
    *("and", "one", "is", "are", "was", "in", "since", "what", "who", "where", "when", "that", "their", "them", "each"),
    *("for", "no", "not", "with", "without", "against", "whole", "full", "side", "beside", "around", "itself", "four"),
    *("went", "waited", "spend", "began", "happened", "shown", "compared", "measured", "does", "filled", "exceeds"),
    *("file", "host", "time", "second", "size", "GB", "memory", "page cache", "storage", "device", "model", "replay"),
    *("kind", "stage", "order", "times", "summary", "definition", "count", "block", "difference", "noise", "vertical"),
    *("band", "more", "less", "better", "fast", "costliest"),
)
DEFINITIONS = {entry.term: entry.definition for entry in ENTRIES}

# Of what a name says beside its terms: units, statistics, and words that join them.
UNITS = (
    *("s", "h", "hours", "bytes", "GB/s", "I/O", "share", "day", "per", "node", "job", "MTBF"),
    *("max", "min", "median", "mean", "slowest", "fastest", "longest", "shortest", "largest", "smallest", "highest"),
    *("lowest", "least", "most", "first", "last", "all", "low", "high", "spread", "total", "number", "n", "interval"),
    *("ratio", "p", "of", "to", "from", "until", "during", "on", "by", "at", "after", "above", "below", "over", "the"),
    *("its", "it", "a"),
)
