"""Measures the storage itself: plain reads and writes of one file per rank, all ranks concurrently."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib

from megatron.fileio.direct_files import aligned_memory, allocate
from restart_trace.clock import now_ns

from ..common import page_cache
from .context import RankContext
from .plan import STORAGE_KINDS

MIB = 1 << 20
_MEMORY = max(max(threads) * max(blocks) for threads, blocks in STORAGE_KINDS.values()) * MIB


def measure(ctx: RankContext) -> dict[str, Any]:
    """Seconds of each kind, by threads and block; {} for a kind that this storage does not support.

    Each write goes to a new file of its final size, a direct one into reserved space, and ends with fsync. The times
    exclude the removal of files. Buffered reads find nothing in the page cache.
    """
    raw = _RawFile(ctx, Path(ctx.task.directory) / f"storage_{ctx.process:05d}")
    found: dict[str, dict[str, float]] = {kind: {} for kind in STORAGE_KINDS}
    try:
        if raw.takes_direct():
            for threads, block, name in _combinations("write_direct"):
                found["write_direct"][name] = raw.write(threads, block, direct=True)
            for threads, block, name in _combinations("read_direct"):
                found["read_direct"][name] = raw.read(threads, block)
            for threads, block, name in _combinations("write_direct_filled"):
                found["write_direct_filled"][name] = raw.write(threads, block, direct=True, filled=True)
            for threads, block, name in _combinations("read_direct_fresh"):
                place = np.empty(raw.size, dtype=np.uint8)
                found["read_direct_fresh"][name] = raw.read(threads, block, place)
                found["read_direct_placed"][name] = raw.read(threads, block, place)  # its pages are in use now
                del place
        for threads, block, name in _combinations("write_buffered_fsync"):
            found["write_buffered_fsync"][name] = raw.write(threads, block, direct=False)
        for threads, block, name in _combinations("read_buffered_cold"):
            seconds = raw.read_buffered_cold(threads, block)
            if seconds is not None:
                found["read_buffered_cold"][name] = seconds
    finally:
        raw.remove()
    return {"seconds": found, "bytes": raw.size}


def _combinations(kind: str) -> Iterator[tuple[int, int, str]]:
    """(threads, bytes of a block, name) of each combination of a kind."""
    for threads, block in itertools.product(*STORAGE_KINDS[kind]):
        yield threads, block * MIB, f"{threads}x{block}"


class _RawFile:
    def __init__(self, ctx: RankContext, path: Path) -> None:
        self._ctx = ctx
        self._path = path
        whole = ctx.request.storage_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self.size = max(mmap.PAGESIZE, whole)
        self._view = aligned_memory(_MEMORY)
        pattern = os.urandom(MIB)
        for offset in range(0, _MEMORY, MIB):
            self._view[offset : offset + MIB] = pattern

    def takes_direct(self) -> bool:
        """Whether the file system of every rank supports O_DIRECT."""
        error: str | None = None
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
            try:
                os.pwrite(fd, self._view[: mmap.PAGESIZE], 0)
            finally:
                os.close(fd)
        except (OSError, AttributeError) as exc:
            if isinstance(exc, OSError) and exc.errno != errno.EINVAL:
                raise
            error = "the file system refuses O_DIRECT"
        self.remove()
        return not self._ctx.control.agree(error)

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def write(self, threads: int, block: int, *, direct: bool, filled: bool = False) -> float:
        """Seconds to write a new file, including the final fsync.

        `filled`: each buffer is copied from other memory just before it is written, which is timed, too.
        """
        self.remove()
        self._settle()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        start = now_ns()
        fd = os.open(self._path, flags, 0o644)
        try:
            if direct:
                allocate(fd, self.size)  # as engine lazy does
            os.ftruncate(fd, self.size)
            before = self._fill if filled else None
            self._transfer(threads, block, lambda view, offset: os.pwrite(fd, view, offset), before=before)
            os.fsync(fd)
            return (now_ns() - start) / 1e9
        finally:
            os.close(fd)

    def read(self, threads: int, block: int, place: np.ndarray[Any, Any] | None = None) -> float:
        """Seconds to read the file that was written last with O_DIRECT, into a few buffers that are reused.

        With `place`, memory as large as the file, the CRC-32 of each block is computed, and it is copied there.
        """
        self._ctx.wait_for_all()
        return self._read(threads, block, os.O_DIRECT, place)

    def read_buffered_cold(self, threads: int, block: int) -> float | None:
        """Seconds to read it through the page cache; None if it could not be evicted from there first."""
        cold = page_cache.state_of(page_cache.drop([self._path])) == page_cache.COLD
        if self._ctx.control.agree(None if cold else "the file stays in the page cache"):
            return None
        return self._read(threads, block, 0, None)

    def _read(self, threads: int, block: int, flags: int, place: np.ndarray[Any, Any] | None) -> float:
        def check_and_place(view: memoryview, offset: int) -> None:
            assert place is not None
            isal_zlib.crc32(view)
            np.copyto(place[offset : offset + len(view)], np.frombuffer(view, np.uint8))

        start = now_ns()
        fd = os.open(self._path, os.O_RDONLY | flags)
        try:
            after = None if place is None else check_and_place
            self._transfer(threads, block, lambda view, offset: os.preadv(fd, [view], offset), after=after)
            return (now_ns() - start) / 1e9
        finally:
            os.close(fd)

    def _fill(self, view: memoryview, offset: int) -> None:
        """Copy to a buffer from other memory, as gathering tensors does."""
        source = np.frombuffer(self._view[_MEMORY // 2 :], np.uint8)
        start = offset % (len(source) - len(view))
        np.copyto(np.frombuffer(view, np.uint8), source[start : start + len(view)])

    def _settle(self) -> None:
        self._ctx.wait_for_all()
        os.sync()
        self._ctx.wait_for_all()

    def _transfer(
        self,
        threads: int,
        block: int,
        move: Callable[[memoryview, int], int],
        *,
        before: Callable[[memoryview, int], None] | None = None,
        after: Callable[[memoryview, int], None] | None = None,
    ) -> None:
        """Move the whole file in blocks, each thread with a buffer of its own. Raises the OSError of a thread.

        `before` and `after` are called for every block, with the buffer and the offset in the file.
        """
        offsets = iter(range(0, self.size, block))
        lock = threading.Lock()

        def work(number: int) -> None:
            mine = self._view[number * block : (number + 1) * block]
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                view = mine[: min(block, self.size - offset)]
                if before is not None:
                    before(view, offset)
                done = 0
                while done < len(view):
                    done += move(view[done:], offset + done)
                if after is not None:
                    after(view, offset)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
