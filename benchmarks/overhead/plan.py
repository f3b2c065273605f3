"""What is to be measured. Imports nothing heavy: the command line needs it."""

from __future__ import annotations

from dataclasses import dataclass

CONTROL = "again"
# family -> (baseline, what is measured against it, the baseline once more)
FAMILIES: dict[str, tuple[str, str, str]] = {
    "save": ("untraced", "traced", CONTROL),
    "write": ("plain", "engine", CONTROL),
    "load": ("untraced", "traced", CONTROL),
    "read": ("plain", "engine", CONTROL),
}


@dataclass(frozen=True)
class Request:
    """What the user asks for, for each directory and number of ranks."""

    bytes_per_rank: int
    rounds: int
    cold: bool
    wait_quiet: bool
    families: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What all ranks of one measurement are told."""

    bytes_per_rank: int
    rounds: int
    cold: bool
    wait_quiet: bool
    families: tuple[str, ...]
    ranks: int
    directory: str
    output: str
