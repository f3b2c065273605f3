"""Values that one cell measured: those that `compare` takes from a trace, and those of the replay or the drill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...common.sweep_files import COLD, DRILL, NO_FAULT, REPLAY, STORAGE, WARM
from .. import open_trace
from ..common.errors import CouldNotRunError
from ..compare.metrics import OF_REPLAY, Metric, Samples, collect
from ..report import Report
from .read import CellResult, read_json

# Every process of a replay is a cycle of its trace, and loads cold, warm or warm again: its own JSON tells them apart.
_MIXED_IN_A_REPLAY = ("load", "launch_s", "iteration_s", "blocked_share", "time_to_first_step_s")
_OF_STORAGE = Metric("", "GB/s", "higher", "the storage itself")


@dataclass(frozen=True)
class Measured:
    """`report` is that of the cell's trace, None if it leaves none. `facts`: what is true of all its values."""

    cell: CellResult
    report: Report | None
    samples: dict[str, Samples]
    facts: dict[str, Any]


def measure(one: CellResult) -> Measured:
    """Everything that a cell which ended well has measured. Raises CouldNotRunError naming what cannot be read."""
    if one.cell.mode == STORAGE:
        return Measured(one, None, _of_storage(read_json(one.directory / REPLAY)), {})
    report = _report(one)
    samples = collect(report)
    facts: dict[str, Any] = {"ranks": report.facts.ranks, "hosts": len(report.facts.hosts) or None}
    facts["engine_used"] = report.cycles[-1].engine_used
    facts["cache"] = None
    facts["limited"] = False
    if one.cell.mode == "replay":
        figures = read_json(one.directory / REPLAY)
        samples = {name: found for name, found in samples.items() if not name.startswith(_MIXED_IN_A_REPLAY)}
        samples |= _of_replay(figures["engines"][one.cell.engine])
        facts |= {"ranks": len(figures["ranks"]), "limited": figures["limited"] is not None}
    elif one.cell.fault != NO_FAULT:
        (injection,) = read_json(one.directory / DRILL)["cycles"]
        facts |= {"cache": injection["cache"], "verified": injection["verified"]}
    return Measured(one, report, samples, facts)


def cache_of(measured: Measured, metric: str) -> str | None:
    """State of the page cache that a value of `metric` was measured with; None where it has no meaning."""
    if metric.startswith("load_cold"):
        return COLD
    if metric.startswith("load_warm"):
        return WARM
    is_of_restart = metric.startswith(("load", "restart", "time_to_first_step", "failure_to"))
    return measured.facts.get("cache") if is_of_restart else None


def _report(one: CellResult) -> Report:
    if one.trace_dir is None:
        raise CouldNotRunError(f"{one.directory}: its result names no trace")
    return open_trace(one.trace_dir, use_cache=False).report


def _of_replay(figures: dict[str, Any]) -> dict[str, Samples]:
    return {
        metric.name: Samples(metric, [float(value) for value in figures[metric.name]["samples"]])
        for metric in OF_REPLAY
        if figures[metric.name] is not None
    }


def _of_storage(figures: dict[str, Any]) -> dict[str, Samples]:
    found = {}
    for key, value in figures["storage"].items():
        if key.endswith("_gbps") and value is not None:
            name = f"storage_{key.removesuffix('_gbps')}_GBps"
            metric = Metric(name, _OF_STORAGE.unit, _OF_STORAGE.better, "best combination of threads and block size")
            found[name] = Samples(metric, [float(value)])
    return found
