"""File objects for torch.save and torch.load that time their own I/O apart from the caller's work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from restart_trace.clock import now_ns

_SMALL_WRITE = 1 << 16
_BLOCK = 1 << 19  # read, then verified while it is still in the processor's cache


class TimedWriter:
    """Unbuffered file for torch.save; small pieces (headers, padding) are joined with what follows.

    What was written can be read back through `fd`.

    Raises FileExistsError if the file exists: overwriting would hide a name used twice.
    """

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.write_ns = 0
        self.num_bytes = 0
        self._pending = bytearray()

    def write(self, data: Any) -> int:
        size = len(data)
        if size < _SMALL_WRITE:
            self._pending += data
            if len(self._pending) >= _SMALL_WRITE:
                self.flush()
            return size
        self.flush()
        self._write_all(memoryview(data))
        return size

    def flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._write_all(memoryview(pending))

    def _write_all(self, view: memoryview) -> None:
        start = now_ns()
        while view:
            written = os.write(self.fd, view)
            self.num_bytes += written
            view = view[written:]
        self.write_ns += now_ns() - start

    def close(self) -> None:
        os.close(self.fd)


class TimedReader:
    """Seekable unbuffered file for torch.load."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self.read_ns = 0
        self.verify_ns = 0

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        position = self._file.tell()
        total = 0
        while total < len(view):
            start = now_ns()
            count = self._file.readinto(view[total : total + _BLOCK])
            middle = now_ns()
            self.read_ns += middle - start
            if not count:
                break
            self._account(position + total, view[total : total + count])
            self.verify_ns += now_ns() - middle
            total += count
        return total

    def _account(self, position: int, view: memoryview) -> None:
        """Verify the bytes `view` that were read at `position`."""

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = os.fstat(self._file.fileno()).st_size - self._file.tell()
        buffer = bytearray(size)
        return bytes(buffer[: self.readinto(buffer)])

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def finish(self) -> None:
        """All is read."""

    def close(self) -> None:
        self._file.close()
