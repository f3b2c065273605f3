"""What is to be measured. Imports nothing heavy: the command line needs it."""

from __future__ import annotations

from dataclasses import dataclass

OPERATIONS = ("save", "load")
BASELINE, TRACED, CONTROL = "untraced", "traced", "again"  # the control is the baseline once more
VARIANTS = (BASELINE, TRACED, CONTROL)


@dataclass(frozen=True)
class Request:
    """What the user asks for, for each directory and number of ranks."""

    bytes_per_rank: int
    rounds: int
    cold: bool
    operations: tuple[str, ...]


@dataclass(frozen=True)
class Plan(Request):
    """What all ranks of one measurement are told."""

    ranks: int
    directory: str
    output: str
