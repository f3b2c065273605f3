"""How far beyond what ran a figure reaches, and from where on it is not to be relied on: one limit for all tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_TIMES = 20  # of what ran
_ROUNDING = 1e-9


def too_far(times: float) -> bool:
    """Whether `times` of what ran are more than an estimate may reach."""
    return times > MOST_TIMES * (1 + _ROUNDING)


@dataclass(frozen=True)
class Extrapolation:
    """What is asked for beyond what ran: `ran` and `asked` are amounts of `unit`."""

    unit: str
    ran: float
    asked: float
    times: float
    too_far: bool


def extrapolation(unit: str, ran: float, asked: float) -> Extrapolation | None:
    """How far `asked` is beyond `ran`; None if it is not."""
    times = asked / ran
    return Extrapolation(unit, ran, asked, times, too_far(times)) if times > 1 + _ROUNDING else None


def headline(reaches: Sequence[Extrapolation]) -> str:
    """For the headline of an output: "extrapolated from 8 to 512 ranks", and which of these is too far."""
    if not reaches:
        return ""
    said = ", ".join(f"from {reach.ran:,.6g} to {reach.asked:,.6g} {reach.unit}" for reach in reaches)
    far = [f"{reach.unit} {reach.times:,.3g} times" for reach in reaches if reach.too_far]
    warning = f"; beyond {MOST_TIMES} times what ran no figure is to be relied on: {', '.join(far)}" if far else ""
    return f"extrapolated {said}{warning}"
