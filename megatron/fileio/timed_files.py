"""File objects for libraries that read and write by themselves: every call is timed, and bytes can be verified."""

from __future__ import annotations

import bisect
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.fileio.checksums import CheckedBytes, RangeChecksum, combine, crc32, range_checksum
from megatron.fileio.files import DamagedFileError, open_file, with_name, write_some
from restart_trace.clock import now_ns
from restart_trace.under_way import STORAGE, UnderWay

_SMALL_WRITE = 1 << 16
_BLOCK = 1 << 20  # read, then verified while it is still in the processor's cache

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

    def total(self, kind: str) -> int:
        """Ns spent on `kind`, of all threads together."""
        return sum(end - start for name, start, end in self.intervals if name == kind)

    def shares(self, kinds: Sequence[str], start_ns: int, end_ns: int) -> dict[str, int]:
        """Ns of the window spent on each of `kinds`; the rest under "". Together they are the window.

        A time in which several were under way, in several threads, counts for the first of them in `kinds`.
        """
        found = sorted(
            (max(begin, start_ns), min(end, end_ns), kind)
            for kind, begin, end in self.intervals
            if kind in kinds and begin < end_ns and end > start_ns
        )
        spent = dict.fromkeys([*kinds, ""], 0)
        if all(end <= begin for (_, end, _), (begin, _, _) in itertools.pairwise(found)):
            # Of one thread, as a rule: thousands of calls, whose sum takes a tenth of the time of what follows.
            for begin, end, kind in found:
                spent[kind] += end - begin
            spent[""] = end_ns - start_ns - sum(spent.values())
            return spent
        events = sorted(event for begin, end, kind in found for event in ((begin, kind, 1), (end, kind, -1)))
        active = dict.fromkeys(kinds, 0)
        before = start_ns
        for time_ns, kind, step in [*events, (end_ns, kinds[0], 0)]:
            spent[next((name for name in kinds if active[name]), "")] += time_ns - before
            before = time_ns
            active[kind] += step
        return spent


class _RawFile(io.FileIO):
    """The unbuffered end of TimedWriter."""

    def __init__(self, path: Path, timeline: Timeline, checksum: bool) -> None:
        super().__init__(path, "x+b", opener=open_file)
        self.path = path
        self.timeline = timeline
        self.num_bytes = 0
        self.crc = 0 if checksum else None
        self.error: OSError | None = None

    def write(self, data: Any, /) -> int:
        start = now_ns()
        try:
            count = write_some(self.fileno(), data)
        except OSError as exc:
            self.error = with_name(exc, self.path)
            raise self.error from None
        written = self.timeline.add("write", start)
        self.num_bytes += count
        if self.crc is not None:
            self.crc = crc32(memoryview(data).cast("B")[:count], self.crc)
            self.timeline.add("checksum", written)
        return count

    def close(self) -> None:
        if not self.closed:
            start = now_ns()
            super().close()
            self.timeline.add("write", start)  # a network file system may write only now


class TimedWriter(io.BufferedWriter):
    """A new file; small pieces (headers, padding) are joined with what follows.

    `timeline` gets "write", closing included, and, with `checksum`, "checksum". What was written can be read back
    through `fileno()`.
    Raises FileExistsError if the file exists: overwriting would hide a name used twice.
    """

    def __init__(self, path: Path, timeline: Timeline, checksum: bool = False) -> None:
        self._file = _RawFile(path, timeline, checksum)
        super().__init__(self._file, _SMALL_WRITE)

    @property
    def num_bytes(self) -> int:
        """Bytes written; what is not flushed is not in it."""
        return self._file.num_bytes

    @property
    def crc(self) -> int | None:
        """CRC-32 of these; None: not computed."""
        return self._file.crc

    @property
    def error(self) -> OSError | None:
        """The error of a write: callers may hide it behind an error of their own."""
        return self._file.error


class TimedReader(io.FileIO):
    """A file that is read in whatever order. Every byte of `checked`, in order, is verified by the time of `finish`.

    `timeline` gets "read" and "verify". `num_bytes` are those read until now.
    """

    def __init__(self, path: Path, timeline: Timeline, checked: Sequence[CheckedBytes] = ()) -> None:
        super().__init__(path, "rb")
        self.path = path
        self.num_bytes = 0
        self._timeline = timeline
        self._checked = checked
        self._starts = [record.start for record in checked]
        self._checksums: dict[int, RangeChecksum] = {}  # by first byte
        self._last: RangeChecksum | None = None  # of these

    def readinto(self, buffer: Any, /) -> int:
        view, name = memoryview(buffer).cast("B"), str(self.path)
        position, total = self.tell(), 0
        while total < len(view):
            start = now_ns()
            with UnderWay(STORAGE, "read of", name):
                count = super().readinto(view[total : total + _BLOCK]) or 0
            done = self._timeline.add("read", start)
            if not count:
                break
            if self._checked:
                self._take_checksums(position + total, view[total : total + count])
                self._timeline.add("verify", done)
            total += count
        self.num_bytes += total
        return total

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            return self.readall()
        buffer = bytearray(size)
        return bytes(memoryview(buffer)[: self.readinto(buffer)])

    def readall(self) -> bytes:
        """The rest of the file, at once: in blocks it would have to be copied together."""
        position, start = self.tell(), now_ns()
        with UnderWay(STORAGE, "read of", str(self.path)):
            content = super().readall()
        done = self._timeline.add("read", start)
        if self._checked:
            self._take_checksums(position, memoryview(content))
            self._timeline.add("verify", done)
        self.num_bytes += len(content)
        return content

    def finish(self) -> None:
        """Read what of `checked` was not read yet. Raises DamagedFileError naming file and part if one differs."""
        read = sorted(self._checksums)
        for record in self._checked:
            found = combine(self._checksums, record.start, record.stop)
            while found.stop < record.stop:
                after = bisect.bisect_right(read, found.stop)
                gap = min(read[after] if after < len(read) else record.stop, record.stop) - found.stop
                self.seek(found.stop)
                self._last = None  # what is read now is to be found by its own first byte
                self.readinto(bytearray(min(gap, _BLOCK)))
                more = combine(self._checksums, found.stop, record.stop)
                if not more.length:
                    break  # someone cut the file off meanwhile, or what is damaged says that parts overlap
                found = found.followed_by(more)
            if (found.stop, found.crc32) != (record.stop, record.crc32):
                raise DamagedFileError(f"{self.path}: {record.name} does not have the checksum it was saved with")

    def _take_checksums(self, position: int, view: memoryview) -> None:
        """Compute the checksums of the parts of `checked` that overlap `view`, which was read at `position`."""
        for index in range(max(bisect.bisect_right(self._starts, position) - 1, 0), len(self._checked)):
            record = self._checked[index]
            start, stop = max(record.start, position), min(record.stop, position + len(view))
            if record.start >= position + len(view):
                break
            if start < stop:
                self._take_checksum(record, start, view[start - position : stop - position])

    def _take_checksum(self, record: CheckedBytes, start: int, content: memoryview) -> None:
        """Compute the checksum of `content`, a part of `record`, joined with the part directly before it."""
        before = self._last
        if before is not None and before.stop == start and before.start >= record.start:
            crc = crc32(content, before.crc32)
            part = RangeChecksum(before.file, before.start, before.length + len(content), crc)
        else:
            part = range_checksum(self.path.name, start, content)
        self._checksums[part.start] = self._last = part


def read_file(path: Path, timeline: Timeline, checked: Sequence[CheckedBytes] = ()) -> bytes:
    """All of a file. Raises DamagedFileError as TimedReader.finish."""
    with TimedReader(path, timeline, checked) as file:
        content = file.readall()
        file.finish()
    return content
