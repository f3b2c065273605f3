"""Targets as rows of a table: limit, worst value, met or missed."""

from __future__ import annotations

from ...common.formatting import number
from ...common.tables import Column, numbers
from ..metrics.results import TargetResult


def verdict(target: TargetResult) -> str:
    """met, MISSED or not observed."""
    return "not observed" if target.met is None else "met" if target.met else "MISSED"


def _limit(target: TargetResult) -> str:
    unit = "" if target.unit == "share" else f" {target.unit}"
    return f"{'at most' if target.upper else 'at least'} {target.limit:g}{unit}"


COLUMNS: tuple[Column[TargetResult], ...] = (
    Column("target", lambda target: target.name),
    Column("limit", _limit),
    numbers("worst", lambda target: target.worst, lambda worst: number(worst, ".4g")),
    numbers("of values", lambda target: target.values),
    Column("verdict", verdict, mark=lambda target: "good" if target.met else "bad"),
)
