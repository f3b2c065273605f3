"""CRC-32s of parts of a file, and the CRC-32s of longer parts that follow from them (zlib's crc32_combine)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from isal import isal_zlib

ALGORITHM = "crc32"

crc32 = isal_zlib.crc32


def checksum_text(crc: int | None) -> str:
    """ "crc32:xxxxxxxx", as a manifest has it; None: not computed."""
    return "none" if crc is None else f"{ALGORITHM}:{crc:08x}"


@dataclass(frozen=True)
class CheckedBytes:
    """Bytes [start, stop) of a file, and the CRC-32 that they were saved with. `name` is for messages."""

    name: str
    start: int
    stop: int
    crc32: int


class RangeChecksum(NamedTuple):  # made for each block of a file: a frozen dataclass costs three times as much
    """CRC-32 of the bytes [start, start + length) of a file."""

    file: str
    start: int
    length: int
    crc32: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    def followed_by(self, after: RangeChecksum) -> RangeChecksum:
        """The checksum of both ranges as one; `after` begins where this one ends."""
        crc = isal_zlib.crc32_combine(self.crc32, after.crc32, after.length)
        return RangeChecksum(self.file, self.start, self.length + after.length, crc)


def range_checksum(file: str, start: int, content: Any) -> RangeChecksum:
    """The checksum of `content`, which lies in the file from byte `start` on."""
    return RangeChecksum(file, start, len(content), isal_zlib.crc32(content))


def by_file(checksums: Iterable[RangeChecksum]) -> dict[str, dict[int, RangeChecksum]]:
    """File -> its checksums as `combine` takes them."""
    found: dict[str, dict[int, RangeChecksum]] = {}
    for checksum in checksums:
        found.setdefault(checksum.file, {})[checksum.start] = checksum
    return found


def combine(checksums: Mapping[int, RangeChecksum], start: int, stop: int) -> RangeChecksum:
    """Checksum of the bytes from `start` up to `stop`, or to the first of them that is in none of `checksums`.

    `checksums`: by first byte. None of them that is met on the way may reach beyond `stop`.
    """
    found = RangeChecksum("", start, 0, 0)
    while found.stop < stop and found.stop in checksums:
        found = found.followed_by(checksums[found.stop])
    return found
