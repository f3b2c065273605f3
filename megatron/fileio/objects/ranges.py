"""Reads an object in ranges, behind the interface by which files are read in blocks."""

from __future__ import annotations

import mmap
import threading

from megatron.fileio.objects.bucket import Bucket
from megatron.fileio.objects.parts import MIB, range_bytes
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation


class ObjectFile:
    """The object with `etag`, as RangedFile: one request for each extent. Its bytes are in no page cache.

    `name`: of the file, in the span that `op` is told of when it is closed.
    """

    alignment = 1
    gap = MIB  # takes about as long to send along as another request
    only_mapped = False

    def __init__(self, bucket: Bucket, key: str, etag: str, num_bytes: int, name: str, op: Operation) -> None:
        self.num_bytes = num_bytes
        self.block = range_bytes(num_bytes)
        self._name = name
        self._op = op
        self._lock = threading.Lock()
        self._read_bytes = 0
        self._begun_ns = self._ended_ns = 0
        self._bucket = bucket
        self._key = key
        self._etag = etag

    def can_be_mapped(self, start: int, stop: int) -> bool:
        return False

    def is_read_directly(self, start: int, stop: int) -> bool:
        return True

    def map(self) -> mmap.mmap:
        raise NotImplementedError("an object is no memory")

    def read(self, view: memoryview, position: int) -> int:
        """As RangedFile.read. Raises DamagedFileError if the object is missing or another, or ObjectStoreError."""
        count = min(len(view), self.num_bytes - position)
        begun = now_ns()
        self._bucket.read_range_hedged(self._key, self._etag, position, view[:count])
        with self._lock:
            self._begun_ns = min(begun, self._begun_ns or begun)
            self._ended_ns = max(now_ns(), self._ended_ns)
            self._read_bytes += count
        return count

    def close(self) -> None:
        if self._read_bytes:
            times = self._begun_ns, self._ended_ns
            self._op.add("load", "download", *times, file=self._name, num_bytes=self._read_bytes, blocking=False)
