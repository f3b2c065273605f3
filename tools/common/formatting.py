"""Numbers as people read them. Decimal units throughout: GB is 1e9 bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

NOT_RECORDED = "-"
_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|min|h|B|kB|MB|GB|TB|GB/s|%)(?![\w/]))")


def seconds(value: float | None, digits: int = 3) -> str:
    return NOT_RECORDED if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """A time as one reads it: 45 s, 25 min, 1.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def digits_for(longest_s: float) -> int:
    """Decimals that show the phases of an operation of this length."""
    return 3 if longest_s >= 1 else 4


def size(num_bytes: float | None, digits: int = 1) -> str:
    """Bytes with a decimal unit, such as 12.3 MB."""
    if num_bytes is None:
        return NOT_RECORDED
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.{digits}f} {unit}"
    return f"{num_bytes:.0f} B"


def rate(GBps: float | None) -> str:
    """GB per second with three significant digits."""
    return NOT_RECORDED if GBps is None else f"{GBps:#.3g}".rstrip(".")


def count(value: int | None) -> str:
    return NOT_RECORDED if value is None else str(value)


def number(value: float | None, spec: str) -> str:
    """A number in the format `spec`, such as ".3f"."""
    return NOT_RECORDED if value is None else format(value, spec)


def percent(share: float | None) -> str:
    """A share of 1. Never rounded up to 100 %."""
    if share is None:
        return NOT_RECORDED
    return f"{min(share, 0.9999) * 100 if share < 1 else 100:.2f} %"


def plural(number: int, noun: str) -> str:
    """1 host, 2 hosts."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def unbroken(text: str) -> str:
    """The text with a space that no line is broken at between each number and its unit."""
    return _UNIT.sub("\u00a0", text)
