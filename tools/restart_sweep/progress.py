"""What a sweep says while it runs: lines on stderr, and how long it will take."""

from __future__ import annotations

import statistics
import sys

from ..common.sweep_files import Cell
from .directory import SweepDirectory


class Times:
    """How long cells took: those of a kind are taken to take what the others did, else what all did."""

    def __init__(self, directory: SweepDirectory, cells: list[Cell]) -> None:
        self._took: dict[tuple[str, ...], list[float]] = {}
        for cell in cells:
            result = directory.result(cell)
            if result is not None:
                self.note(cell, result["took_s"])

    def note(self, cell: Cell, took_s: float) -> None:
        for kind in _kinds(cell):
            self._took.setdefault(kind, []).append(took_s)

    def of(self, cells: list[Cell]) -> float:
        """Seconds that these will take, as far as can be told."""
        return sum(statistics.mean(next(self._took[k] for k in _kinds(cell) if k in self._took)) for cell in cells)


def _kinds(cell: Cell) -> list[tuple[str, ...]]:
    """From the narrowest to all cells."""
    return [(cell.what,), (cell.mode, cell.model, cell.layout), (cell.mode,), ()]


def to_stderr(text: str) -> None:
    print(f"restart-sweep: {text}", file=sys.stderr, flush=True)
