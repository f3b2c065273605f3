"""The samples of a comparison: one value per operation, that of its slowest rank, since ranks are no repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..metrics.iterations import StepTime
from ..metrics.results import OperationStats, PhaseStats, StartStats
from ..report import Report

Part = TypeVar("Part", OperationStats, StepTime)


@dataclass(frozen=True)
class Metric:
    """A quantity of a run. `kind`: "repeated" (tested), "counted" (no noise) or "total" (one value per run)."""

    name: str
    unit: str
    better: str
    definition: str
    kind: str = "repeated"
    headline: bool = False


@dataclass
class Samples:
    """Values of one metric in one run. `warm_up` are those of first saves and first steps of a cycle."""

    metric: Metric
    values: list[float] = field(default_factory=list)
    warm_up: list[float] = field(default_factory=list)


def _time(name: str, definition: str, *, headline: bool = False) -> Metric:
    return Metric(name, "s", "lower", definition, headline=headline)


def _throughput(name: str, definition: str, *, headline: bool = False) -> Metric:
    return Metric(name, "GB/s", "higher", definition, headline=headline)


def _total(name: str, unit: str, better: str, definition: str) -> Metric:
    return Metric(name, unit, better, definition, "total", headline=True)


_SAVE: list[tuple[Metric, Callable[[OperationStats], float | None]]] = [
    (_time("blocked_s", "training blocked by a save", headline=True), lambda s: s.blocked_s),
    (_time("drain_s", "the end of training, or a load, waiting for a save"), lambda s: s.drain_s),
    (_time("durable_s", "start of a save until it is durable", headline=True), lambda s: s.durable_s),
    (_time("committed_s", "start of a save until it is committed", headline=True), lambda s: s.committed_s),
    (_time("save_s", "wall time of a save", headline=True), lambda s: s.wall and s.wall.max_s),
    (_time("save_spread_s", "slowest less fastest rank of a save"), lambda s: s.wall and s.wall.spread_s),
    (_throughput("blocked_GBps", "bytes of a save over blocked_s", headline=True), lambda s: s.blocked_GBps),
    (_throughput("save_io_GBps", "bytes of a save over its slowest rank's write and fsync"), lambda s: s.io_GBps),
    (Metric("save_bytes", "bytes", "neither", "bytes of a save", "counted", True), lambda s: s.bytes),
    (Metric("save_files", "files", "neither", "files of a save", "counted", True), lambda s: s.num_files),
]
_LOAD: list[tuple[Metric, Callable[[OperationStats], float | None]]] = [
    (_time("load_s", "wall time of a load", headline=True), lambda s: s.wall and s.wall.max_s),
    (_throughput("load_io_GBps", "bytes of a load over its slowest rank's reading"), lambda s: s.io_GBps),
    (Metric("load_bytes", "bytes", "neither", "bytes of a load", "counted"), lambda s: s.bytes),
]
_FIRST_STEP = "process start to first step of a restart"
_CAUGHT_UP = "failure until the step reached before is passed"
_RESTART: list[tuple[Metric, Callable[[StartStats], float | None]]] = [
    (_time("restart_s", "failure to the end of the first step", headline=True), lambda s: s.restart_s),
    (_time("time_to_first_step_s", _FIRST_STEP, headline=True), lambda s: s.wall and s.wall.max_s),
    (_time("failure_to_caught_up_s", _CAUGHT_UP), lambda s: s.failure_to_caught_up_s),
    (_time("caught_up_s", "process start until that step is passed"), lambda s: s.caught_up_s),
    (_time("lost_work_s", "training that a failure undid", headline=True), lambda s: s.lost_work_s),
    (_time("down_s", "from the end of a cycle to the start of the next"), lambda s: s.down_s),
    (_time("return_s", "a rank that returns leaving the start before"), lambda s: s.return_s),
]
OF_REPLAY = (  # a replay knows saves in memory alone, the page cache of each load, and the memory of each save
    _time("in_memory_s", "start of a save until all ranks have agreed on it in memory", headline=True),
    _time("load_cold_s", "load with the checkpoint out of the page cache", headline=True),
    _time("load_warm_s", "load with the checkpoint in the page cache", headline=True),
    _time("load_warm_again_s", "second warm load in the same process"),
    Metric("peak_rss_bytes", "bytes", "lower", "memory that a save takes beside the state"),
)
_LAUNCH = _time("launch_s", "process start to first step without a checkpoint", headline=True)
_STEP = _time("iteration_s", "one training step, saves not in it", headline=True)
_TOTAL_S = _total("total_blocked_s", "s", "lower", "training blocked by all saves")
_TOTAL_GBPS = _total("total_blocked_GBps", "GB/s", "higher", "bytes of all saves over total_blocked_s")
_SHARE = _total("blocked_share", "share", "lower", "training time that saves block, of all of it")
_PRINTED = _throughput("printed_GBps", "throughput as the trainer printed it, its size an estimate")
_PRINTED_TOTAL = _total(
    "printed_total_GBps", "GB/s", "higher", "printed sizes of all saves over their printed latencies"
)


def known_metrics() -> list[Metric]:
    """The metrics that a trace may have a value of, but for those of single phases."""
    tables = [metric for table in (_SAVE, _LOAD, _RESTART) for metric, _ in table]
    return [*tables, _LAUNCH, _STEP, _TOTAL_S, _TOTAL_GBPS, _SHARE]


def collect(report: Report) -> dict[str, Samples]:
    """Name -> samples of every metric that `report` has a value of. Saves and loads that did not end well are out."""
    collected: dict[str, Samples] = {}
    saves = report.complete_saves
    loads = [load for load in report.loads if load.outcome == "ok" and load.tag is not None]
    _operations(collected, _SAVE, saves, first_is_warm_up=report.replayed is None)  # a replay warms up by itself
    _operations(collected, _LOAD, loads, first_is_warm_up=False)
    for metric, value_of in _RESTART:
        for start in report.restarts:
            _add(collected, metric, value_of(start))
    for start in report.first_launches:
        _add(collected, _LAUNCH, start.wall and start.wall.max_s)
    for start in report.restarts:
        _phases(collected, "restart", start.phases, warm_up=False)
    for step, first in _with_first(report.steps):
        _add(collected, _STEP, step.seconds, warm_up=first)
    if report.replayed is None:
        _totals(collected, report, saves)
    _of_replay(collected, report)
    _as_printed(collected, report)
    return collected


def _with_first(parts: Iterable[Part]) -> Iterator[tuple[Part, bool]]:
    """Operations or steps, each with whether it is the first of its cycle."""
    seen: set[int] = set()
    for part in parts:
        yield part, part.cycle not in seen
        seen.add(part.cycle)


def _add(collected: dict[str, Samples], metric: Metric, value: float | None, *, warm_up: bool = False) -> None:
    if value is None:
        return
    samples = collected.setdefault(metric.name, Samples(metric))
    (samples.warm_up if warm_up else samples.values).append(float(value))


def _operations(
    collected: dict[str, Samples],
    table: Iterable[tuple[Metric, Callable[[OperationStats], float | None]]],
    operations: Sequence[OperationStats],
    *,
    first_is_warm_up: bool,
) -> None:
    for stats, first in _with_first(operations):
        warm_up = first and first_is_warm_up
        for metric, value_of in table:
            _add(collected, metric, value_of(stats), warm_up=warm_up)
        _phases(collected, stats.operation, stats.phases, warm_up=warm_up)


def _phases(collected: dict[str, Samples], operation: str, phases: list[PhaseStats], *, warm_up: bool) -> None:
    """One metric per phase, such as save.flush_s, and per detail, such as save.flush.fsync_s."""
    for phase in phases:
        name = f"{operation}.{phase.name}"
        metric = _time(f"{name}_s", f"phase {phase.name} of a {operation}", headline=True)
        _add(collected, metric, phase.time.max_s, warm_up=warm_up)
        for detail in phase.details:
            metric = _time(f"{name}.{detail.name}_s", f"{phase.name}/{detail.name} of a {operation}")
            _add(collected, metric, detail.time.max_s, warm_up=warm_up)


def _totals(collected: dict[str, Samples], report: Report, saves: list[OperationStats]) -> None:
    """Values over the whole run, its first saves included."""
    blocked = [save.blocked_s for save in saves if save.blocked_s is not None]
    if blocked:
        _add(collected, _TOTAL_S, sum(blocked))
    sized = [(save.bytes, save.blocked_s) for save in saves if save.bytes and save.blocked_s]
    if sized and len(sized) == len(saves):
        _add(collected, _TOTAL_GBPS, sum(b for b, _ in sized) / 1e9 / sum(s for _, s in sized))
    _add(collected, _SHARE, _blocked_share(report))


def _blocked_share(report: Report) -> float | None:
    """Share of the training time that its saves blocked; None where one of both is not recorded.

    A save after the last step of a cycle comes when no step is left to end: its blocked time is training time, too.
    """
    blocked = [save for save in report.saves if save.blocked_s is not None]
    if not blocked or not report.training:
        return None
    last_steps = {training.cycle: training.last_step for training in report.training}
    after = [s for s in blocked if s.step is not None and s.step >= last_steps.get(s.cycle, s.step)]
    trained_s = sum(training.seconds for training in report.training)
    trained_s += sum(save.blocked_s or 0.0 for save in after)
    return sum(save.blocked_s or 0.0 for save in blocked) / trained_s if trained_s > 0 else None


def _of_replay(collected: dict[str, Samples], report: Report) -> None:
    """What a replay's JSON has of the engines of the report's cycles."""
    known = report.replayed.values if report.replayed else {}
    for values in (known.get(info.engine_asked or "", {}) for info in report.cycles):
        for metric in OF_REPLAY:
            for value in values.get(metric.name, []):
                _add(collected, metric, value)


def _as_printed(collected: dict[str, Samples], report: Report) -> None:
    """What the log of an imported run prints itself."""
    if report.imported is None:
        return
    printed = [save.printed for save in report.imported.saves if save.printed]
    for index, entry in enumerate(printed):
        _add(collected, _PRINTED, entry.GBps, warm_up=index == 0)
    if latency_s := sum(entry.latency_s for entry in printed):
        _add(collected, _PRINTED_TOTAL, sum(entry.gigabytes for entry in printed) / latency_s)
    for name, values in report.imported.timers.items():
        metric = _time(f"timer.{name}_s", f"<TIMER:{name}> of the log")
        for value in values:
            _add(collected, metric, value)
