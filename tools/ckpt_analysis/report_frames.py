"""The numbers of a report as frames, whose columns `TraceAnalysis` lists and docs/metrics.md defines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl

from .metrics.goodput.definitions import Measured
from .metrics.results import OperationStats, PhaseStats, Stats
from .report import Report

_SPREAD = {"max_s": pl.Float64, "median_s": pl.Float64, "min_s": pl.Float64, "slowest_rank": pl.Int64}
_SPREAD |= {"at_critical_s": pl.Float64}
_VOLUME = {"bytes": pl.Int64, "num_files": pl.Int64, "GBps": pl.Float64, "blocking": pl.String}
_SAVED = ("blocked_s", "drain_s", "committed_s", "durable_s", "io_GBps", "blocked_GBps")
_STARTED = {"restart_s": pl.Float64, "caught_up_s": pl.Float64, "lost_steps": pl.Int64, "lost_work_s": pl.Float64}
_STARTED |= {"down_s": pl.Float64, "return_s": pl.Float64}
SUMMARY = (
    {"run_id": pl.String, "operation": pl.String, "cycle": pl.Int64, "tag": pl.String, "step": pl.Int64}
    | {"engine": pl.String, "outcome": pl.String, "phase": pl.String, "detail": pl.String, "ranks": pl.Int64}
    | _SPREAD
    | _VOLUME
    | dict.fromkeys((*_SAVED, "coverage_min", "unattributed_s"), pl.Float64)
    | _STARTED
)
_FINDING = {"rule": pl.String, "title": pl.String, "evidence": pl.String, "advice": pl.String, "cost_s": pl.Float64}
_PROBLEM = {"kind": pl.String, "severity": pl.String, "message": pl.String}
_GOODPUT = {"owner": pl.String, "name": pl.String, "share": pl.Float64, "seconds": pl.Float64, "missing": pl.String}
_GOODPUT |= {"formula": pl.String, "source": pl.String}
_BUDGET = {"cycle": pl.Int64, "rank": pl.Int64, "part": pl.String, "start_s": pl.Float64, "end_s": pl.Float64}


def operations_of(report: Report) -> list[Stats]:
    """Starts, loads, saves and saves of weights only, each in order: the order of every table."""
    return [*report.starts, *report.loads, *report.saves, *report.weights]


def summary(report: Report) -> pl.DataFrame:
    """A row per operation, in which phase is null, and a row per phase and detail of it."""
    return pl.DataFrame(list(_summary_rows(report)), schema=SUMMARY)


def findings(report: Report) -> pl.DataFrame:
    """A row per finding, the costliest first; `data` is JSON text."""
    return _rows(report.findings, _FINDING)


def problems(report: Report) -> pl.DataFrame:
    """A row per problem, the gravest first; `data` is JSON text."""
    return _rows(report.problems, _PROBLEM)


def budget(report: Report) -> pl.DataFrame:
    """A row per stretch of the run's wall time; no row if no start-up was recorded."""
    if report.budget is None:
        return pl.DataFrame(schema=_BUDGET)
    ranks = {entry.cycle: entry.rank for entry in report.budget.cycles}
    rows = [(one.cycle, ranks[one.cycle], one.part, one.start_s, one.end_s) for one in report.budget.segments]
    return pl.DataFrame(rows, schema=_BUDGET, orient="row")


def goodput(found: Sequence[Measured]) -> pl.DataFrame:
    """A row per definition of goodput or type of badput."""
    rows = [(one.definition.owner, one.definition.name, one.share, one.seconds, one.missing) for one in found]
    more = [(one.definition.formula, one.definition.source) for one in found]
    return pl.DataFrame([row + rest for row, rest in zip(rows, more, strict=True)], schema=_GOODPUT, orient="row")


def _rows(entries: list[Any], schema: dict[str, Any]) -> pl.DataFrame:
    rows = [_fields(entry, schema) | {"data": json.dumps(entry.data)} for entry in entries]
    return pl.DataFrame(rows, schema=schema | {"data": pl.String})


def _summary_rows(report: Report) -> Iterator[dict[str, Any]]:
    for stats in operations_of(report):
        labels: dict[str, Any] = {"run_id": report.run_id, "operation": stats.kind, "cycle": stats.cycle}
        names = [*_STARTED]
        if isinstance(stats, OperationStats):
            labels |= _fields(stats, ("tag", "step", "engine", "outcome"))
            names = ["bytes", "num_files", *_SAVED]
        whole = _fields(stats, ("ranks", "coverage_min", *names)) | _fields(stats.wall, _SPREAD)
        yield labels | whole | {"unattributed_s": stats.unattributed.max_s if stats.unattributed else None}
        for phase in stats.phases:
            yield labels | _phase(phase) | {"phase": phase.name}
            for detail in phase.details:
                yield labels | _phase(detail) | {"phase": phase.name, "detail": detail.name}


def _phase(phase: PhaseStats) -> dict[str, Any]:
    return _fields(phase.time, _SPREAD) | _fields(phase, ("ranks", *_VOLUME))


def _fields(value: object, names: Any) -> dict[str, Any]:
    """These attributes; none of None."""
    return {} if value is None else {name: getattr(value, name) for name in names}
