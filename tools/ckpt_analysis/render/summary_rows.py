"""The numbers of a report as rows of two tables: one row per operation, one per phase of an operation."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...common.escaping import markdown, shown
from ...common.formatting import NOT_RECORDED, percent, rate, size
from ...common.tables import Column, Style, csv_table, markdown_table, numbers, text_table, texts, times, titles
from ..common.problems import told
from ..metrics.results import OperationStats, StartStats, Stats
from ..report import Report
from ..report_frames import operations_of, summary
from .phase_table import PhaseLine, phase_lines, time_columns, volume_columns
from .targets import COLUMNS as TARGETS

_ALL_UP_TO = 8  # operations whose phases are all shown; of more, the last of each kind


class _Row(NamedTuple):
    """A phase of an operation, as a row."""

    stats: Stats
    line: PhaseLine


def _outcome(stats: Stats) -> str:
    if isinstance(stats, OperationStats):
        return stats.outcome
    if stats.wall:
        return "ok"
    return "unfinished" if isinstance(stats, StartStats) and stats.steps_observed else "unknown"


def _of_operation(title: str, name: str, show: Any) -> Column[Stats]:
    return numbers(title, lambda stats: getattr(stats, name, None), show)


def _seconds_of_save(title: str, name: str) -> Column[Stats]:
    return times(title, lambda stats: getattr(stats, name) if stats.kind == "save" else None)


_OPERATION: tuple[Column[Stats], ...] = (
    Column("operation", lambda stats: _name(stats)),
    Column("cycle", lambda stats: str(stats.cycle)),
    Column("outcome", lambda stats: _outcome(stats)),
    Column("ranks", lambda stats: str(stats.ranks)),
    _of_operation("bytes", "bytes", size),
    numbers("files", lambda stats: getattr(stats, "num_files", None)),
    times("slowest s", lambda stats: stats.wall and stats.wall.max_s),
    numbers("critical rank", lambda stats: stats.critical_rank),
    times("median s", lambda stats: stats.wall and stats.wall.median_s),
    _seconds_of_save("blocked s", "blocked_s"),
    _seconds_of_save("durable s", "durable_s"),
    _of_operation("I/O GB/s", "io_GBps", rate),
    Column("coverage", lambda stats: percent(stats.coverage_min)),
)
_PHASE: tuple[Column[_Row], ...] = (
    Column("operation", lambda row: _name(row.stats)),
    Column("phase", lambda row: row.line.name),
    *(
        Column(column.title, lambda row, column=column: column.text(row.line))
        for column in [*time_columns(), *volume_columns()]
    ),
    Column("blocking", lambda row: row.line.stats.blocking if row.line.stats else NOT_RECORDED),
)


def csv_text(report: Report) -> str:
    """One line per operation and per phase and detail of it; numbers that are not known are empty."""
    table = summary(report)
    return csv_table(table.columns, table.iter_rows())


def table_text(report: Report, style: Style, *, show_all: bool) -> str:
    """Both tables for a terminal, and the errors and warnings that the numbers are to be read with."""
    operations, phases = _both(shown(report), show_all)
    lines = [style.heading("Operations"), *text_table(*operations, style, indent="")]
    lines += ["", style.heading("Phases"), *text_table(*phases, style, indent="")]
    if report.targets:
        rows = texts(TARGETS, shown(report).targets)
        lines += ["", style.heading("Targets"), *text_table(titles(TARGETS), rows, style, indent="")]
    problems = told(shown(report).problems)
    if problems:
        lines += ["", style.heading("Problems"), *map(style.warning, problems)]
    return "\n".join(lines) + "\n"


def markdown_text(report: Report, *, show_all: bool) -> str:
    """Both tables as GitHub's Markdown, and the errors and warnings."""
    operations, phases = _both(shown(report, markdown), show_all)
    lines = [*markdown_table(*operations, numbers=True), "", *markdown_table(*phases, numbers=True)]
    if report.targets:
        lines += ["", *markdown_table(titles(TARGETS), texts(TARGETS, report.targets), numbers=True)]
    problems = told(shown(report, markdown).problems)
    if problems:
        lines += ["", *(f"- {problem}" for problem in problems)]
    return "\n".join(lines) + "\n"


def _both(report: Report, show_all: bool) -> list[tuple[list[str], list[list[str]]]]:
    """(titles, rows) of the operations and of the phases."""
    phases = texts(_PHASE, _rows(report, show_all))
    return [(titles(_OPERATION), texts(_OPERATION, operations_of(report))), (titles(_PHASE), phases)]


def _rows(report: Report, show_all: bool) -> list[_Row]:
    """The phases of all operations; of many, of the last of each kind."""
    chosen = operations_of(report)
    if not show_all and len(chosen) > _ALL_UP_TO:
        chosen = [*report.starts[-1:], *report.loads[-1:], *report.saves[-1:]]
    return [_Row(stats, line) for stats in chosen for line in phase_lines(stats.phases)]


def _name(stats: Stats) -> str:
    return f"{stats.kind} {getattr(stats, 'tag', None) or stats.cycle}"
