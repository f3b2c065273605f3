"""The numbers of a report as rows of two tables: one row per operation, one per phase of an operation."""

from __future__ import annotations

import io
from typing import Any

from ..common.escaping import csv_row, markdown, shown
from ..common.formatting import count, percent, rate, seconds, size
from ..metrics.results import OperationStats, PhaseStats, Spread, StartStats
from ..report import Report
from .tables import Style, align

# Columns of the CSV. docs/metrics.md defines them; phase and detail are empty for an operation as a whole.
CSV_COLUMNS: tuple[str, ...] = (
    "run_id", "operation", "cycle", "tag", "step", "engine", "outcome", "phase", "detail", "ranks", "max_s",
    "median_s", "min_s", "slowest_rank", "at_critical_s", "bytes", "num_files", "GBps", "blocking", "blocked_s",
    "drain_s", "committed_s", "durable_s", "io_GBps", "blocked_GBps", "coverage_min", "unattributed_s",
    "restart_s", "caught_up_s", "lost_steps", "lost_work_s", "down_s",
)  # fmt: skip
_OPERATION_HEADER = (
    "operation", "cycle", "outcome", "ranks", "bytes", "files", "slowest s", "rank", "median s", "blocked s",
    "durable s", "I/O GB/s", "coverage",
)  # fmt: skip
_PHASE_HEADER = (
    "operation", "phase", "slowest s", "rank", "median s", "min s", "bytes", "files", "GB/s", "blocking",
)  # fmt: skip
_ALL_UP_TO = 8  # operations whose phases are all shown; of more, the last of each kind

Stats = OperationStats | StartStats


def csv_text(report: Report) -> str:
    """One line per operation and per phase and detail of it; numbers that are not known are empty."""
    stream = io.StringIO()
    csv_row(stream, CSV_COLUMNS)

    def write(row: dict[str, Any]) -> None:
        csv_row(stream, [row.get(name, "") for name in CSV_COLUMNS])

    for stats in _operations(report):
        labels = {"run_id": report.run_id} | _labels(stats)
        write(labels | _whole(stats))
        for phase in stats.phases:
            write(labels | _phase(phase) | {"phase": phase.name})
            for detail in phase.details:
                write(labels | _phase(detail) | {"phase": phase.name, "detail": detail.name})
    return stream.getvalue()


def table_text(report: Report, style: Style, *, show_all: bool) -> str:
    """Both tables for a terminal."""
    operations, phases = _tables(shown(report), show_all)
    lines = [style.heading("Operations"), *align(_OPERATION_HEADER, operations, style, indent="")]
    lines += ["", style.heading("Phases"), *align(_PHASE_HEADER, phases, style, indent="")]
    return "\n".join(lines) + "\n"


def markdown_text(report: Report, *, show_all: bool) -> str:
    """Both tables as GitHub's Markdown."""
    operations, phases = _tables(shown(report, markdown), show_all)
    return (
        "\n".join([*_markdown(_OPERATION_HEADER, operations), "", *_markdown(_PHASE_HEADER, phases)]) + "\n"
    )


def _operations(report: Report) -> list[Stats]:
    return [*report.starts, *report.loads, *report.saves]


def _tables(report: Report, show_all: bool) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    everything = _operations(report)
    shown = everything
    if not show_all and len(everything) > _ALL_UP_TO:
        shown = [*report.starts[-1:], *report.loads[-1:], *report.saves[-1:]]
    phases = []
    for stats in shown:
        for phase in stats.phases:
            phases.append(_phase_row(stats, phase, phase.name))
            phases += [_phase_row(stats, detail, f"{phase.name}/{detail.name}") for detail in phase.details]
    return [_operation_row(stats) for stats in everything], phases


def _kind(stats: Stats) -> str:
    if isinstance(stats, StartStats):
        return "restart" if stats.is_restart else "launch"
    return stats.operation


def _name(stats: Stats) -> str:
    tag = None if isinstance(stats, StartStats) else stats.tag
    return f"{_kind(stats)} {tag}" if tag else f"{_kind(stats)} {stats.cycle}"


def _wall(stats: Stats) -> Spread | None:
    return stats.time_to_first_step if isinstance(stats, StartStats) else stats.wall


def _labels(stats: Stats) -> dict[str, Any]:
    labels: dict[str, Any] = {"operation": _kind(stats), "cycle": stats.cycle}
    if isinstance(stats, OperationStats):
        labels |= {"tag": stats.tag, "step": stats.step, "engine": stats.engine, "outcome": stats.outcome}
    return labels


def _whole(stats: Stats) -> dict[str, Any]:
    row: dict[str, Any] = {"ranks": stats.ranks, "coverage_min": stats.coverage_min}
    row["unattributed_s"] = stats.unattributed.max_s if stats.unattributed else None
    row |= _spread(_wall(stats))
    names = (
        "bytes",
        "num_files",
        "blocked_s",
        "drain_s",
        "committed_s",
        "durable_s",
        "io_GBps",
        "blocked_GBps",
    )
    if isinstance(stats, StartStats):
        names = ("restart_s", "caught_up_s", "lost_steps", "lost_work_s", "down_s")
    return row | {name: getattr(stats, name) for name in names}


def _spread(spread: Spread | None) -> dict[str, Any]:
    if spread is None:
        return {}
    names = ("max_s", "median_s", "min_s", "slowest_rank", "at_critical_s")
    return {name: getattr(spread, name) for name in names}


def _phase(phase: PhaseStats) -> dict[str, Any]:
    names = ("ranks", "bytes", "num_files", "GBps", "blocking")
    return _spread(phase.time) | {name: getattr(phase, name) for name in names}


def _operation_row(stats: Stats) -> tuple[str, ...]:
    wall = _wall(stats)
    start = (_name(stats), str(stats.cycle))
    times = (
        seconds(wall.max_s if wall else None, 4),
        count(wall.slowest_rank if wall else None),
        seconds(wall.median_s if wall else None, 4),
    )
    if isinstance(stats, StartStats):
        outcome = "ok" if wall else "unfinished"
        return (
            *start,
            outcome,
            str(stats.ranks),
            "-",
            "-",
            *times,
            "-",
            "-",
            "-",
            percent(stats.coverage_min),
        )
    volume = (size(stats.bytes), count(stats.num_files))
    cost = (
        (seconds(stats.blocked_s, 4), seconds(stats.durable_s, 4))
        if stats.operation == "save"
        else ("-", "-")
    )
    coverage = percent(stats.coverage_min)
    return (*start, stats.outcome, str(stats.ranks), *volume, *times, *cost, rate(stats.io_GBps), coverage)


def _phase_row(stats: Stats, phase: PhaseStats, name: str) -> tuple[str, ...]:
    time = phase.time
    return (
        _name(stats), name, seconds(time.max_s, 4), str(time.slowest_rank), seconds(time.median_s, 4),
        seconds(time.min_s, 4), size(phase.bytes), count(phase.num_files), rate(phase.GBps), phase.blocking,
    )  # fmt: skip


def _markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    ruler = "|".join(["---", *["---:"] * (len(header) - 1)])
    lines = [" | ".join(header), *(" | ".join(row) for row in rows)]
    return [f"| {lines[0]} |", f"|{ruler}|", *(f"| {line} |" for line in lines[1:])]
