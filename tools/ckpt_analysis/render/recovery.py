"""Curves of effective training time over failure rates, as a table for people, as Markdown, CSV or JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, fields

from ...common.escaping import markdown, shown
from ...common.formatting import percent
from ...common.tables import Style, csv_table, markdown_table, text_table
from ..project.recovery import Curves, Point

_WIDTH = 100
_TITLE = "Projection: effective training time ratio, with the restarts that were measured"
_INPUTS = ("curve", "restarts", "restart s", "blocked s", "counts after s", "step s", "saved every")


def to_json(curves: Curves) -> str:
    """The keys are those of project/recovery.py; docs/metrics.md defines them."""
    return json.dumps(asdict(curves), indent=2, allow_nan=False) + "\n"


def to_csv(curves: Curves) -> str:
    """One line per point; the first column says that it is a projection."""
    names = [entry.name for entry in fields(Point)]
    return csv_table(
        ("kind", *names), [(curves.kind, *(getattr(point, name) for name in names)) for point in curves.points]
    )


def to_markdown(curves: Curves) -> str:
    """Tables in GitHub's Markdown."""
    curves = shown(curves, markdown)
    lines = [f"**{_TITLE}**", "", *markdown_table(_INPUTS, _inputs(curves))]
    lines += ["", *markdown_table(_titles(curves), _rows(curves)), ""]
    return "\n".join([*lines, *(f"- {assumption}" for assumption in curves.assumptions)]) + "\n"


def to_table(curves: Curves, style: Style) -> str:
    """For the terminal."""
    curves = shown(curves)
    lines = [style.heading(_TITLE), *text_table(_INPUTS, _inputs(curves), style)]
    lines += ["", *text_table(_titles(curves), _rows(curves), style), ""]
    lines.append("In brackets: with the slowest and the fastest restart. Assumed:")
    for assumption in curves.assumptions:
        lines += textwrap.wrap(assumption, _WIDTH, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def _inputs(curves: Curves) -> list[tuple[str, ...]]:
    rows = []
    for each in curves.recoveries:
        inputs, times, interval = each.inputs, each.restarts_s, each.interval_steps
        rows.append(
            (
                each.name,
                str(len(times)),
                f"{inputs.restart_s.value:.4g} ({times[0]:.4g} to {times[-1]:.4g})",
                f"{inputs.blocked_s.value:.4g} {inputs.blocked_s.source}",
                f"{inputs.durable_s.value:.4g} {inputs.durable_s.source}",
                f"{inputs.step_s.value:.4g} {inputs.step_s.source}",
                f"{interval.value:g} steps {interval.source}",
            )
        )
    return rows


def _titles(curves: Curves) -> tuple[str, ...]:
    return ("failures/day", *(each.name for each in curves.recoveries))


def _rows(curves: Curves) -> list[tuple[str, ...]]:
    number = len(curves.failures_per_day)
    by_curve = [curves.points[start : start + number] for start in range(0, len(curves.points), number)]
    return [
        (f"{rate:g}", *(_ratio(points[i]) for points in by_curve)) for i, rate in enumerate(curves.failures_per_day)
    ]


def _ratio(point: Point) -> str:
    return f"{percent(point.ettr)} ({percent(point.ettr_slowest)} to {percent(point.ettr_fastest)})"
