"""Files written by libraries that do their own I/O: each call is timed, and every byte goes into the file's CRC-32."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isal import isal_zlib

from restart_trace.clock import now_ns

ALGORITHM = "crc32"

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
