"""A directory as `ls -lh` shows it, compared with a plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# permissions, links, owner, group, size, month, day, time or year, name
_LINE = re.compile(
    r"^-[-rwxsStT]{9}\S?\s+\d+\s+\S+\s+\S+\s+(?P<size>[\d.]+[KMGTPE]?)\s+\S+\s+\S+\s+\S+\s+(?P<name>\S+)$"
)
_UNITS = "KMGTPE"


@dataclass(frozen=True)
class Comparison:
    """`sizes`: name -> (planned size, listed size) of files whose sizes differ."""

    agreeing: int
    missing: tuple[str, ...]  # planned, not in the listing
    unplanned: tuple[str, ...]  # listed, not in the plan
    sizes: dict[str, tuple[str, str]]

    @property
    def agrees(self) -> bool:
        return not (self.missing or self.unplanned or self.sizes)


def human_size(num_bytes: int) -> str:
    """A size as `ls -h` prints it: units of 1024, at least two digits, always rounded up (GNU coreutils,
    human_ceiling).
    """
    if num_bytes < 1024:
        return str(num_bytes)
    power = 1
    while num_bytes > 1023 * 1024**power and power < len(_UNITS):
        power += 1
    unit = 1024**power
    tenths = -(-num_bytes * 10 // unit)
    if tenths < 100:
        return f"{tenths // 10}.{tenths % 10}{_UNITS[power - 1]}"
    return f"{-(-num_bytes // unit)}{_UNITS[power - 1]}"


def parse_listing(text: str) -> dict[str, str]:
    """Name -> size of the files that the output of `ls -lh` lists; lines of another form are skipped.

    Raises ValueError if no line lists a file.
    """
    found = {match["name"]: match["size"] for match in map(_LINE.match, text.splitlines()) if match}
    if not found:
        raise ValueError("contains no line of `ls -lh`")
    return found


def compare(planned: Mapping[str, int], listed: Mapping[str, str]) -> Comparison:
    """Compare planned sizes (name -> bytes) with listed ones (name -> size as printed)."""
    both = [name for name in planned if name in listed]
    sizes = {name: (human_size(planned[name]), listed[name]) for name in both}
    different = {name: pair for name, pair in sizes.items() if pair[0] != pair[1]}
    return Comparison(
        agreeing=len(both) - len(different),
        missing=tuple(name for name in planned if name not in listed),
        unplanned=tuple(name for name in listed if name not in planned),
        sizes=different,
    )
