"""Output of curves of goodput over failure rates."""

from __future__ import annotations

from dataclasses import asdict, fields

from ...common.escaping import shown
from ...common.formatting import percent
from ..project.recovery import Curves, Point
from .document import Block, Document, Heading, Notes, Table

_TITLE = "Projection: goodput, with the restarts that were measured"
_INPUTS = ("run", "restarts", "restart s", "blocked s", "durable s", "step s", "interval")


def document(curves: Curves) -> Document:
    """The keys are those of project/recovery.py; docs/metrics.md defines them. Rows say that they are projected."""
    names = [entry.name for entry in fields(Point)]
    rows = [(curves.kind, *(getattr(point, name) for name in names)) for point in curves.points]
    return Document(asdict(curves), ("kind", *names), rows, lambda safe: _blocks(shown(curves, safe)))


def _blocks(curves: Curves) -> list[Block]:
    return [
        Heading(_TITLE),
        Table(_INPUTS, _inputs(curves)),
        Table(("failures/day", *(each.name for each in curves.recoveries)), _rows(curves)),
        Notes("In brackets: with the slowest and the fastest restart. Assumed", curves.assumptions),
    ]


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


def _rows(curves: Curves) -> list[tuple[str, ...]]:
    number = len(curves.failures_per_day)
    by_curve = [curves.points[start : start + number] for start in range(0, len(curves.points), number)]
    return [
        (f"{rate:g}", *(_ratio(points[i]) for points in by_curve)) for i, rate in enumerate(curves.failures_per_day)
    ]


def _ratio(point: Point) -> str:
    return f"{percent(point.goodput)} ({percent(point.goodput_slowest)} to {percent(point.goodput_fastest)})"
