"""Sizes that `ls` and `du` rounded, as the range of bytes that they stand for."""

from __future__ import annotations

import re

_SIZE = re.compile(r"^(\d+)(?:\.(\d))?([KMGTPE]?)$")
_UNITS = "KMGTPE"


def size_range(text: str) -> tuple[int, int]:
    """(low, high) of the bytes that `text` stands for, such as "8.8G": both ends possible.

    GNU coreutils round up with -h, to a tenth below ten units and to a whole unit above (units of 1024). A plain
    number is exact. Raises ValueError if `text` is no such size.
    """
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size as `ls -lh` or `du -h` prints it")
    whole, tenth, unit = match.groups()
    if not unit:
        return int(whole), int(whole)
    scale = 1024 ** (_UNITS.index(unit) + 1)
    tenths = 10 * int(whole) + int(tenth or 0)
    step_tenths = 1 if tenth else 10
    high = tenths * scale // 10
    low = (tenths - step_tenths) * scale // 10 + 1
    return max(0, low), high
