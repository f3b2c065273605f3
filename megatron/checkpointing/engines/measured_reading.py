"""Files read by libraries that do their own I/O: each call is timed, and every byte is checked against a CRC-32."""

from __future__ import annotations

import bisect
import io
import os
from pathlib import Path
from typing import Any

from isal import isal_zlib

from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.fileio.measured_io import ALGORITHM, Timeline, checksum_text
from restart_trace.clock import now_ns

_BLOCK = 1 << 19  # read, then verified while it is still in the processor's cache


def expected_crc(path: Path, expected: SavedFile | None) -> int | None:
    """The CRC-32 that the manifest has of a file; None if it has none to compare with.

    Raises CheckpointDamagedError if what it has is no CRC-32.
    """
    if expected is None or expected.checksum == "none":
        return None
    algorithm, _, digits = expected.checksum.partition(":")
    try:
        if algorithm == ALGORITHM:
            return int(digits, 16)
    except ValueError:
        pass
    raise CheckpointDamagedError(f"{path}: checksum {expected.checksum!r} is not one of this engine's")


def check_crc(path: Path, found: int, expected: int) -> None:
    """Raises CheckpointDamagedError naming the file if the two differ."""
    if found != expected:
        raise CheckpointDamagedError(
            f"{path}: checksum {checksum_text(found)}, but {checksum_text(expected)} was saved"
        )


class MeasuredReader(io.FileIO):
    """A file open for reading, in whatever order. With `expected`, a CRC-32, `finish` checks every byte of it.

    Pieces that were read in order are checked as they come; what is left is read by `finish`.
    """

    def __init__(self, path: Path, timeline: Timeline, expected: int | None) -> None:
        super().__init__(path, "rb")
        self._path = path
        self._timeline = timeline
        self._expected = expected
        self._pieces: dict[int, tuple[int, int]] = {}  # offset -> bytes, CRC-32

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        total = 0
        while total < len(view):
            position = self.tell()
            start = now_ns()
            count = super().readinto(view[total : total + _BLOCK]) or 0
            done = self._timeline.add("read", start)
            if not count:
                break
            if self._expected is not None:
                self._pieces[position] = (count, isal_zlib.crc32(view[total : total + count]))
                self._timeline.add("verify", done)
            total += count
        return total

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = max(os.fstat(self.fileno()).st_size - self.tell(), 0)
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.readinto(buffer)])

    def readall(self) -> bytes:
        return self.read(-1)

    def finish(self) -> None:
        """Raises CheckpointDamagedError if the file does not have the CRC-32 that is expected of it."""
        if self._expected is None:
            return
        size = os.fstat(self.fileno()).st_size
        position = crc = 0
        starts = sorted(self._pieces)
        block = memoryview(bytearray(_BLOCK))
        while position < size:
            if position not in self._pieces:
                after = bisect.bisect_right(starts, position)
                gap = (starts[after] if after < len(starts) else size) - position
                self.seek(position)
                if not self.readinto(block[: min(gap, _BLOCK)]):
                    break  # someone cut the file off meanwhile
            length, piece = self._pieces[position]
            crc = isal_zlib.crc32_combine(crc, piece, length)
            position += length
        check_crc(self._path, crc, self._expected)


def read_file(path: Path, timeline: Timeline, expected: int | None) -> bytes:
    """All of a file, timed. Raises CheckpointDamagedError if it does not have the CRC-32 that is expected of it."""
    with path.open("rb", buffering=0) as file:
        start = now_ns()
        size = os.fstat(file.fileno()).st_size
        content = file.read(size) or b""
        while len(content) < size and (
            more := file.read(size - len(content))
        ):  # more than 2 GiB come in pieces
            content += more
        done = timeline.add("read", start)
    if expected is not None:
        crc = isal_zlib.crc32(content)
        timeline.add("verify", done)
        check_crc(path, crc, expected)
    return content
