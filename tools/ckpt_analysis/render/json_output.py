"""The report as JSON. The keys are a public contract: docs/metrics.md defines each of them."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable
from typing import Any

from ..metrics.budget import Budget
from ..metrics.device_copies import DeviceCopies
from ..metrics.restart_parts import parts_of
from ..metrics.results import FailureTimes, OperationStats, PhaseStats, Spread, StartStats, Stats
from ..report import Report

# Attributes that are keys, in their order.
_CYCLE = "cycle expected present missing layout hosts engine_asked engine_used durability versions label"
_OPERATION = "tag step cycle engine tier outcome error ranks finished_ranks bytes num_files"
_SAVE = "blocked_s drain_s blocked_GBps committed_s durable_s"
_COPIES = "ranks bytes device_s slowest_rank slowest_GBps median_GBps bus_share overlapped"
_TRAFFIC = (
    "ranks objects bytes window_s requests retries throttled requests_per_s success connections connections_rank "
    "small_objects small_s small_rank"
)
_HOST_COPIES = "host ranks bytes GBps bus_GBps"
_TIER = "tier host ranks bytes seconds"
_READS = "checkpoint_bytes bytes amplification"
_HOST_READS = "host ranks bytes storage_bytes"
_REPLICATION = "ranks bytes seconds slowest_rank waited_s at_once_bytes wire_bytes compress_s"
_COMPRESSION = "ranks bytes stored_bytes compress_s"
_LOST = "caught_up_s resumed_step reached_step lost_steps lost_work_s repeated_steps equal_losses down_s restart_s"
_FAILURE = "fault detected_s stopped_s relaunched_s"
_HOST_FAILURE = "host detected_s stopped_s relaunched_s"
_SPREAD = "max_s median_s min_s spread_s slowest_rank"
_PHASE = "ranks bytes num_files GBps blocking"
_RANK = "rank wall_s blocked_s coverage unattributed_s phases"
_STORAGE = "use directory mount ranks"
_TARGET = "name unit limit worst values"
_FINDING = "rule title evidence advice cost_s data"


def to_json(report: Report) -> str:
    """The report as JSON text, a line for each key and each item of a list. Numbers that are not known are null.

    Indented deeper, the JSON of a large run would take Python longer than all of its analysis.
    """
    lines = []
    for key, value in to_dict(report).items():
        if isinstance(value, list) and value:
            items = ",\n    ".join(json.dumps(item, allow_nan=False) for item in value)
            lines.append(f'  "{key}": [\n    {items}\n  ]')
        else:
            lines.append(f'  "{key}": {json.dumps(value, allow_nan=False)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def to_dict(report: Report) -> dict[str, Any]:
    """The report as JSON types."""
    # The cycle with the most missing ranks, the newest of equals: its numbers are the least complete.
    worst = max(report.cycles, key=lambda info: (len(info.missing), info.cycle))
    return {
        "run_id": report.run_id,
        "ranks": {"expected": worst.expected, "present": worst.present},
        "cycles": [_fields(info, _CYCLE) for info in report.cycles],
        "saves": [_operation(stats) for stats in report.saves],
        "weights": [_operation(stats) for stats in report.weights],
        "loads": [_operation(stats) for stats in report.loads],
        "restarts": [_start(start) for start in report.restarts],
        "launches": [_start(start) for start in report.first_launches],
        "critical_path": _critical_path(report),
        "problems": [_fields(problem, "kind severity message data") for problem in report.problems],
        "findings": [_fields(finding, _FINDING) for finding in report.findings],
        "model": report.model,
        "storage": [_fields(storage, _STORAGE) for storage in report.storage],
        "targets": [_fields(target, _TARGET) | {"met": target.met} for target in report.targets],
        "budget": _budget(report.budget) if report.budget else None,
    }


def _critical_path(report: Report) -> dict[str, Any] | None:
    path = report.path
    if path is None:
        return None
    wait = _fields(path.wait, "rank phase seconds") if path.wait else None
    result = _fields(path, "cycle length_s outside") | {"wait": wait}
    return result | {"parts": [_fields(part, "rank phase seconds") for part in path.parts]}


def _budget(budget: Budget) -> dict[str, Any]:
    def parts(seconds: dict[str, float]) -> dict[str, float]:
        return {f"{part}_s": took for part, took in seconds.items()}

    cycles = [{"cycle": entry.cycle, "rank": entry.rank} | parts(entry.seconds) for entry in budget.cycles]
    return (
        {"wall_s": budget.wall_s, "idle_s": budget.idle_s, "goodput": budget.goodput}
        | parts(budget.seconds)
        | {"cycles": cycles}
    )


def _fields(value: object, names: str) -> dict[str, Any]:
    keys, get = _getter(names)
    return dict(zip(keys, get(value), strict=True))


@functools.cache  # a large report calls it for each rank and phase of each operation
def _getter(names: str) -> tuple[list[str], Callable[[object], tuple[Any, ...]]]:
    keys = names.split()
    return keys, operator.attrgetter(*keys)


def _operation(stats: OperationStats) -> dict[str, Any]:
    result = _fields(stats, _OPERATION) | _wall(stats)
    result |= {"io_GBps": stats.io_GBps} | _coverage_and_phases(stats)
    result["store_traffic"] = _fields(stats.store_traffic, _TRAFFIC) if stats.store_traffic else None
    if stats.operation == "save":
        sent = _fields(stats.replication, _REPLICATION) if stats.replication else None
        result |= _fields(stats, _SAVE) | {"device_copies": _copies(stats.device_copies), "replication": sent}
        return result | {"compression": _fields(stats.compression, _COMPRESSION) if stats.compression else None}
    tiers = [_fields(tier, _TIER) for tier in stats.tiers]
    result |= {"load_s": stats.wall.max_s if stats.wall else None, "tiers": tiers, "reads": None}
    if stats.reads is not None:
        hosts = [_fields(host, _HOST_READS) for host in stats.reads.hosts]
        result["reads"] = _fields(stats.reads, _READS) | {"hosts": hosts}
    return result


def _copies(copies: DeviceCopies | None) -> dict[str, Any] | None:
    if copies is None:
        return None
    return _fields(copies, _COPIES) | {"hosts": [_fields(host, _HOST_COPIES) for host in copies.hosts]}


def _start(start: StartStats) -> dict[str, Any]:
    result = _fields(start, "cycle ranks finished_ranks")
    result |= {"time_to_first_step_s": start.wall.max_s if start.wall else None} | _wall(start)
    result |= _fields(start, f"{_LOST} after_critical_s failure_to_caught_up_s returned_ranks new_ranks return_s")
    result["failure"] = _failure(start.failure) if start.failure else None
    result["parts"] = parts_of(start) if start.wall else None
    return result | _coverage_and_phases(start)


def _failure(failure: FailureTimes) -> dict[str, Any]:
    by_host = [_fields(host, _HOST_FAILURE) for host in failure.hosts]
    return _fields(failure, _FAILURE) | ({"hosts": by_host} if by_host else {})


def _wall(stats: Stats) -> dict[str, Any]:
    return {
        "critical_rank": stats.critical_rank,
        "critical_phase": stats.critical_phase,
        "wall": _spread(stats.wall, "at_critical_s"),
    }


def _coverage_and_phases(stats: Stats) -> dict[str, Any]:
    return {
        "coverage_min": stats.coverage_min,
        "coverage_rank": stats.coverage_rank,
        "unattributed_s": stats.unattributed.max_s if stats.unattributed else None,
        "phases": _phases(stats.phases),
        "per_rank": [_fields(rank, _RANK) for rank in stats.per_rank],
    }


def _spread(spread: Spread | None, more: str = "") -> dict[str, Any] | None:
    return _fields(spread, f"{_SPREAD} {more}") if spread else None


def _phases(phases: list[PhaseStats]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for phase in phases:
        entry = _fields(phase.time, f"{_SPREAD} at_critical_s") | _fields(phase, _PHASE)
        if phase.details:
            entry["details"] = _phases(phase.details)
        result[phase.name] = entry
    return result
