"""Definitions of the report's terms, shown on the page. A test compares them with docs/metrics.md."""

from __future__ import annotations

DEFINITIONS: dict[str, str] = {
    "operation": "one save, load or start-up of the run, over all its ranks. The n-th save of a tag in a "
    "cycle on each rank is one operation; so is the n-th load in a cycle. A load that passes over a damaged "
    "checkpoint and takes an older one is one load.",
    "wall time": "of an operation on a rank: `operation_end.end_ns - operation_end.start_ns`. For a "
    "start-up it ends with the end of the `first_step` span.",
    "between ranks": "a duration is the slowest rank's and a throughput is total bytes over that. Beside it "
    "stand the median, the minimum and the slowest rank (of equals the lowest). A rank that spent no time "
    "in a phase counts as 0.",
    "busy time": "of a set of spans on a rank: overlapping windows form clusters; each cluster gives the "
    "sum of its `duration_ns`, at most its length; the clusters are summed. So phases that alternate within "
    "one window (serialize and write) count what each took, and four writer threads at once count a moment "
    "once. Windows that only touch do not overlap.",
    "critical rank": "of an operation: the rank for which the others waited, not the one with the longest wall time, "
    "which often waited itself. It is the rank on which the critical path spends most time outside of `rendezvous`, "
    "`communicators`, `barrier` and `first_step`; of equals the lowest. Critical phase: the phase in which it spent "
    "most of that time; `late`, if it began the operation that much later than the others: all leave a meeting at the "
    "same time, so the later rank left it sooner after its begin. What is said of an operation on one rank (where its "
    "time went, the shares of its phases, a waterfall) is said of the critical rank, in sentences, findings, tables, "
    "figures and JSON alike.",
    "own time": "of a rank in an operation: busy time in the phases in which it does not wait for others, "
    "which are all but `barrier`, `rendezvous` and `wait_previous`, and those that follow when it is over "
    "(`caught_up`, `remove`).",
    "critical path": "of a start: found backwards from the end of the last first step. On a rank it follows "
    "what the rank did, the innermost span of each moment; phases that alternate within one window have it one after "
    "another, each as long as it took. At a phase that no rank leaves before all have come (`rendezvous`, "
    "`communicators`, `barrier`, `first_step`) it goes on with the rank that came last. Of a save or load: from the "
    "end of the rank with the longest wall time; the rank that waited least, or did not wait, is the one that came "
    "last.",
    "waiting": "time of a rank in its n-th `barrier` span of an operation. All leave together, so the rank "
    "that waits least came last and was waited for; ranks without an n-th span did something else while the "
    "others waited, and were waited for.",
    "skew": "of a barrier: longest less shortest wait of a rank; the longest wait, where ranks that have no "
    "span of it were waited for. No clocks of different hosts are compared.",
    "step during a save": "a training step of which a save of the same rank was under way for some part, on any rank.",
    "probes": "samples that each rank takes of itself, its host and its device just before an operation "
    "begins and just after it ended; in between with --restart-trace-probes-interval.",
    "blocked_s": "saves only: union of the blocking spans but those of `drain_s`, of the rank where it is "
    "largest: by how much the save held training up",
    "committed_s": "saves only: first rank's start to the end of the last `commit` span with detail "
    "manifest or publish; null if there is none or the save failed. Setting old checkpoints aside "
    "(`prune`), and removing their files (`remove`), come after",
    "durable_s": "saves only: `committed_s` if some rank states `durable` true and none false; else null",
    "io_GBps": "saves: bytes of `flush`/`write` over the slowest rank's `flush` (write and fsync). Loads: "
    "bytes of `load`/`read` over the slowest rank's `read`. Through the page cache unless the engine goes "
    "around it",
    "blocked_GBps": "saves only: `bytes` over `blocked_s`",
    "unattributed_s": "wall time less covered time, of the rank where it is largest. Never spread over the phases",
    "coverage_min": "lowest coverage of a finished rank. Coverage: busy time of all its spans, cut to the "
    "operation, over its wall time",
    "time_to_first_step_s": "start of the process (in the OS; of `megatron.launch`, where that imported "
    "everything for this start) to the end of its `first_step` span, of the slowest rank",
    "restart_s": "last `injected` event of the cycle before (the first `detected` one if nobody injected it) to the "
    "end of the last rank's `first_step`; null without a supervisor's record",
    "caught_up_s": "start of the process to the end of its `caught_up` span (the iteration reached before "
    "the failure is passed again), of the slowest rank; null until then",
    "lost_steps": "`reached_step - resumed_step`, not below 0; null for a launch",
    "lost_work_s": "time of the iterations after `resumed_step` up to `reached_step`, as the newest earlier "
    "cycle ran each, on the rank that spent most. Saves and evaluation between them, and the iteration "
    "under way at the failure, are not in it",
    "load_s": "loads only: wall time of the slowest rank",
    "goodput": "training that counts over wall time: the share of `training_s` in `wall_s` of the run's budget",
    "blocked share": "of a run: the sum of `blocked_s` over its saves, over its training time: from the begin of "
    "the first to the end of the last training step of each cycle, and what saves after that last step blocked. Of "
    "an imported log: all its log intervals, which hold the saves between steps.",
    "speed-up": "value of the first run over that of another, of throughputs the inverse: above 1 the other is "
    "better. Saves and restarts count with the median over the run.",
}
