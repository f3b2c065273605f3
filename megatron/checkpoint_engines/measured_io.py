"""Files for libraries that do their own I/O: each call is timed, and every byte goes into the file's CRC-32."""

from __future__ import annotations

import bisect
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isal import isal_zlib

from megatron.checkpoint_engines.base import SavedFile
from megatron.checkpoint_engines.errors import CheckpointDamagedError
from megatron.restart_trace.clock import now_ns

ALGORITHM = "crc32"
_BLOCK = 1 << 19  # read, then verified while it is still in the processor's cache

Interval = tuple[str, int, int]  # what was done, begin and end in monotonic ns


class Timeline:
    """What was done when, from any thread."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []  # list.append is atomic

    def add(self, kind: str, start_ns: int) -> int:
        """Note that `kind` was done from `start_ns` until now; returns the present."""
        end = now_ns()
        self.intervals.append((kind, start_ns, end))
        return end

    def shares(self, kinds: Sequence[str], start_ns: int, end_ns: int) -> dict[str, int]:
        """Ns of the window spent on each of `kinds`; the rest under "". Together they are the window.

        A moment in which several were under way, in several threads, counts for the first of them in `kinds`.
        """
        events = sorted(_events(self.intervals, kinds, start_ns, end_ns))
        spent = dict.fromkeys([*kinds, ""], 0)
        active = dict.fromkeys(kinds, 0)
        before = start_ns
        for moment, kind, step in [*events, (end_ns, kinds[0], 0)]:
            spent[next((name for name in kinds if active[name]), "")] += moment - before
            before = moment
            active[kind] += step
        return spent


def _events(
    intervals: Iterable[Interval], kinds: Sequence[str], start: int, end: int
) -> Iterable[tuple[int, str, int]]:
    for kind, begin, stop in intervals:
        if kind in kinds and begin < end and stop > start:
            yield max(begin, start), kind, 1
            yield min(stop, end), kind, -1


def checksum_text(crc: int | None) -> str:
    """As SavedFile.checksum has it; None: not computed."""
    return "none" if crc is None else f"{ALGORITHM}:{crc:08x}"


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


def sync_directory(path: Path) -> None:
    """fsync a directory: the names of the files in it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def with_name(exc: OSError, path: Path | str) -> OSError:
    """The same error with the name of the file, which the system calls on a descriptor do not give."""
    if exc.errno is None or exc.filename is not None:
        return exc
    return OSError(exc.errno, exc.strerror, str(path))


@dataclass
class Written:
    """What went into a file. `opened_ns` and `closed_ns` enclose all of it; the others are times within."""

    path: Path
    opened_ns: int
    closed_ns: int = 0
    num_bytes: int = 0
    crc: int | None = None
    write_ns: int = 0
    checksum_ns: int = 0
    fsync_ns: int = 0
    error: OSError | None = None  # of a write: callers may hide it behind an error of their own


class _RawFile(io.FileIO):
    """The unbuffered end of MeasuredFile."""

    def __init__(self, path: Path, timeline: Timeline, checksum: bool) -> None:
        super().__init__(path, "wb")
        self.record = Written(path, now_ns(), crc=0 if checksum else None)
        self.timeline = timeline

    def write(self, data: Any, /) -> int:
        start = now_ns()
        try:
            count = super().write(data)
        except OSError as exc:
            self.record.error = with_name(exc, self.record.path)
            raise self.record.error from None
        written = self.timeline.add("write", start)
        self.record.write_ns += written - start
        self.record.num_bytes += count
        if self.record.crc is not None:
            self.record.crc = isal_zlib.crc32(memoryview(data).cast("B")[:count], self.record.crc)
            self.record.checksum_ns += self.timeline.add("checksum", written) - written
        return count


class MeasuredFile(io.BufferedWriter):
    """A file open for writing, buffered as open(path, "wb") is. `record` is complete once it is closed.

    `fileno` is taken for the beginning of an fsync, which ends with `close`: libraries ask for it for nothing else.
    It hands over what is still in the buffer first, which os.fsync(file.fileno()) alone leaves out.
    """

    def __init__(self, path: Path, timeline: Timeline, checksum: bool) -> None:
        raw = _RawFile(path, timeline, checksum)
        super().__init__(raw)
        self.record = raw.record
        self._timeline = timeline
        self._sync_ns: int | None = None

    def fileno(self) -> int:
        self.flush()
        self._sync_ns = now_ns()
        return super().fileno()

    def close(self) -> None:
        if self.closed:
            return
        if self._sync_ns is not None:
            self.record.fsync_ns = self._timeline.add("fsync", self._sync_ns) - self._sync_ns
        try:
            super().close()
        finally:
            self.record.closed_ns = now_ns()


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
