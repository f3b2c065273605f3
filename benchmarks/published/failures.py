"""Published times between failures, intervals, and shares of useful time, by `ckpt-analysis project`."""

from __future__ import annotations

from collections.abc import Iterator

from tools.ckpt_analysis.metrics.goodput.meta import ExpectedRatio
from tools.ckpt_analysis.project.inputs import Given, gather
from tools.ckpt_analysis.project.projection import Row, project

from .figure import Figure, Source

_MINUTE_S, _DAY_H = 60.0, 24.0
_GPUS_PER_NODE = 8
_READ = (
    "github.com/dimaggi-ai/network-vs-more-gpus, validation/VALIDATION_REPORT.md and ASSUMPTIONS.md; as quoted: an "
    "article after the notes on it in glennklockwood.com/garden/papers"
)
_META = Source(
    "Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025, "
    "arXiv 2410.21680",
    "https://arxiv.org/abs/2410.21680",
    _READ,
)
_LLAMA = Source(
    "The Llama 3 Herd of Models, arXiv 2407.21783",
    "https://arxiv.org/abs/2407.21783",
    "datacenterdynamics.com, Meta report details hundreds of GPU and HBM3 related interruptions to Llama 3 training",
)
_MLCOMMONS = Source(
    "MLCommons, New MLPerf Storage v2.0 Benchmark Results, 4 August 2025",
    "https://mlcommons.org/2025/08/mlperf-storage-v2-0-results/",
    "its reprint by GlobeNewswire",
)
_HSDP = Source(
    "Salpekar et al., Training LLMs with Fault Tolerant HSDP on 100,000 GPUs, arXiv 2602.00277",
    "https://arxiv.org/abs/2602.00277",
    "its abstract; the times between failures in github.com/allenwang28/naniGPT, journal/2026-02-21-fault-tolerance.md",
)
_LAN = Source("Chang Lan, Optimal Checkpointing Frequency", "https://changlan.org/posts/optimal-checkpointing/")
_RESTARTS_FAIL = (
    "in the projection failures hit restarts, too, which then begin again; in the source, as in the next row, all "
    "stalls fit between failures"
)
_RSC1, _RSC2 = 6.50, 2.34  # failures per 1,000 node-days


def figures() -> list[Figure]:
    """The figures, by source."""
    return [*_between_failures(), *_interruptions(), *_useful_time(), *_intervals()]


def _row(
    nodes: float,
    node_mtbf_hours: float,
    *,
    restart_s: float = 0.0,
    blocked_s: float = 0.0,
    step_s: float = 1.0,
    interval_steps: int = 1,
    rule: str = "given",
) -> Row:
    """The row of `ckpt-analysis project` with these flags; saves are durable when they no longer block."""
    inputs = gather(None, Given(blocked_s, blocked_s, restart_s, step_s))
    rows = project(inputs, [round(nodes)], [node_mtbf_hours], [interval_steps]).rows
    return next(row for row in rows if row.rule == rule)


def _mtbf_hours(per_1000_node_days: float) -> float:
    return 1000 * _DAY_H / per_1000_node_days


def _between_failures() -> Iterator[Figure]:
    rate = f"RSC-1: {_RSC1:.2f} failures per 1,000 node-days, 8 GPUs a node"
    for gpus, hours, digits in ((16384, 1.8, 1), (131072, 0.23, 2)):
        found = _row(gpus / _GPUS_PER_NODE, _mtbf_hours(_RSC1)).job_mtbf_hours
        yield Figure(
            f"time between failures, {gpus:,} GPUs",
            _META,
            "figure 7 and its text",
            hours,
            "h",
            rate,
            found,
            digits=digits,
        )
    yield Figure(
        "time between failures, 1,024 GPUs",
        _META,
        "figure 7 and its text",
        7.9,
        "h",
        rate,
        _row(128, _mtbf_hours(_RSC1)).job_mtbf_hours,
        digits=1,
        limit=2.7,
        why="measured, and not projected; what stops small jobs besides failing nodes is missing",
    )
    yield Figure(
        "time between failures, 1,024 GPUs",
        _META,
        "figure 7, as quoted",
        7.9,
        "h",
        "jobs of 8 GPUs, one node: 47.7 days",
        _row(128, 47.7 * _DAY_H).job_mtbf_hours,
        digits=1,
        limit=0.15,
        why="other jobs than those of 8 GPUs: how they differ is missing",
    )
    for accelerators, minutes in ((100_000, 30), (1_000_000, 3)):
        found = _row(accelerators, 50_000).job_mtbf_hours * 60
        yield Figure(
            f"time between failures, {accelerators:,} accelerators",
            _MLCOMMONS,
            "text",
            minutes,
            "min",
            "mean time to failure of an accelerator: 50,000 h",
            found,
        )
    yield Figure(
        "time between failures, 100,000 GPUs",
        _HSDP,
        "as quoted",
        18,
        "min",
        "2.3 interruptions per 1,000 servers and day, measured with 32,000 GPUs",
        _row(12_500, _mtbf_hours(2.3)).job_mtbf_hours * 60,
        limit=1.8,
        why="failures grow faster than the number of servers; what they have in common is missing",
    )


def _interruptions() -> Iterator[Figure]:
    low, high = (54 * _row(16384 / 8, _mtbf_hours(rate)).failures_per_day for rate in (_RSC2, _RSC1))
    yield Figure(
        "Llama 3, unexpected interruptions in 54 days",
        _LLAMA,
        "table 5",
        419,
        "",
        f"16,384 GPUs; Meta's clusters RSC-2 and RSC-1: {_RSC2} and {_RSC1:.2f} failures per 1,000 node-days (S5)",
        (low, high),
        why="of the cluster that trained it no other rate is published",
    )


def _useful_time() -> Iterator[Figure]:
    every_2 = _row(12_500, _mtbf_hours(_RSC2), restart_s=2 * _MINUTE_S, step_s=2 * _MINUTE_S).goodput
    yield Figure(
        "ETTR, 100,000 GPUs",
        _META,
        "as quoted",
        90,
        "%",
        f"RSC-2: {_RSC2} failures per 1,000 node-days; a save every 2 min that blocks nothing, restarts of 2 min",
        100 * every_2,
        limit=0.05,
        why='the paper says "~2 minutes"; what a save blocks is missing',
    )
    for what, stall, share, limit in (("synchronous", 10, 44, 0.31), ("FT-HSDP", 3, 80, 0.06)):
        inputs = f"a failure every 18 min, each stalls training for {stall} min; no work is lost besides"
        why = _RESTARTS_FAIL if stall == 10 else "as for synchronous training"
        found = _row(1, 18 / 60, restart_s=stall * _MINUTE_S, step_s=1e-3).goodput
        yield Figure(
            f"effective training time, {what}", _HSDP, "abstract", share, "%", inputs, 100 * found, limit=limit, why=why
        )
        # Nothing is lost or blocked between saves: an interval of next to nothing.
        expected = ExpectedRatio(1 / (18 * _MINUTE_S), stall * _MINUTE_S, 1e-3, 0.0).ratio
        away = "a replica that is away trains nothing, which no stall counts"
        off = {} if stall == 10 else {"limit": 0.05, "why": away}
        what = f"{what}, by `expected_ettr`"
        yield Figure(f"effective training time, {what}", _HSDP, "abstract", share, "%", inputs, 100 * expected, **off)


def _intervals() -> Iterator[Figure]:
    row = _row(1, 6000 / 3600, restart_s=600, blocked_s=10, step_s=15, rule="young")
    yield Figure(
        "steps between saves",
        _LAN,
        "example",
        24,
        "steps",
        "time between interruptions 6000 s, to recover 600 s, to save 10 s, step 15 s",
        row.interval_steps,
        limit=-0.05,
        why="the source adds the time to recover to that between interruptions; Young 1974 does not",
    )
