"""What a matrix, a soak or stops would inject, shown by --dry-run before anything is started."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ..common.formatting import plural
from .matrix import Cell
from .soak.result import Goal
from .soak.schedule import in_order
from .soak.stops import Stop, drawn


def of_limits(limit_s: float, hang_limit_s: float) -> str:
    """One sentence: when a launch has failed."""
    return f"A launch fails after {limit_s:g} s, or after {hang_limit_s:g} s without an iteration."


def of_matrix(sequences: Sequence[Sequence[Cell]]) -> list[str]:
    """A line for each sequence of launches, then their numbers."""
    lines = []
    for number, sequence in enumerate(sequences):
        faults = ", ".join(f"{cell.fault} {cell.injection_point}" for cell in sequence)
        lines.append(f"sequence {number}: {sequence[0].supervisor}, engine {sequence[0].engine}: {faults}")
    cells = sum(map(len, sequences))
    return [*lines, f"{plural(cells, 'cell')} in {plural(len(sequences), 'sequence')}, and a reference run"]


def of_soak(goal_of: Mapping[str, Goal], faults: Sequence[str], seed: int) -> list[str]:
    """A line for each engine: its saves at least, and its faults in their order."""
    lines = []
    for engine, goal in goal_of.items():
        order = in_order(faults, seed, goal.first)
        if goal.restarts is None:
            extent = f"for {(goal.seconds or 0.0) / 60:g} minutes, beginning with {next(order)}"
        else:
            extent = f"at least {plural(goal.saves, 'save')}; {', '.join(itertools.islice(order, goal.restarts))}"
        lines.append(f"engine {engine}: {extent}")
    return lines


def of_stops(number: int, chosen: Sequence[Stop], seed: int) -> list[str]:
    """A line for each stop, as --stop takes it."""
    return [str(stop) for stop in itertools.islice(itertools.cycle(chosen) if chosen else drawn(seed), number)]
