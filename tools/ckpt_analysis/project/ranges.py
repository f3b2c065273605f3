"""Values of flags that take several: a list such as 8,64,512, or a range that doubles such as 8..1024."""

from __future__ import annotations

import math

from ..common.errors import CouldNotRunError

_MOST = 1000  # values of one flag; more is a slip of the finger


def parse_counts(flag: str, text: str) -> list[int]:
    """Whole numbers from 1. Raises CouldNotRunError naming `flag` if `text` is something else."""
    values: list[int] = []
    for part in text.split(","):
        low, dots, high = part.partition("..")
        first = _count(flag, text, low)
        last = _count(flag, text, high) if dots else first
        if first > last:
            raise CouldNotRunError(f"{flag} {text}: {first}..{last} is empty; give the smaller number first")
        values += [first << doubled for doubled in range((last // first).bit_length())]
    if len(values) > _MOST:
        raise CouldNotRunError(f"{flag} {text}: {len(values)} values; give {_MOST} at most")
    return list(dict.fromkeys(values))


def parse_positives(flag: str, text: str) -> list[float]:
    """Numbers above 0, separated by commas. Raises CouldNotRunError naming `flag` if `text` is something else."""
    values: list[float] = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise CouldNotRunError(f"{flag} {text}: {part.strip()!r} is no number above 0; give some as 1000,50000")
        values.append(value)
    return list(dict.fromkeys(values))


def _count(flag: str, text: str, part: str) -> int:
    part = part.strip()
    if not (part.isascii() and part.isdigit() and int(part) >= 1):
        raise CouldNotRunError(f"{flag} {text}: {part!r} is no number from 1; give some as 8,64 or 8..1024 (doubling)")
    return int(part)
