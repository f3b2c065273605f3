"""What the storage itself can do: plain reads and writes of one file per rank, all ranks at once."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron.restart_trace.clock import now_ns
from tools.ckpt_replay import page_cache
from tools.ckpt_replay.context import RankContext
from tools.ckpt_replay.plan import COLD, STORAGE_KINDS

MIB = 1 << 20
_MEMORY = max(max(threads) * max(blocks) for threads, blocks in STORAGE_KINDS.values()) * MIB


def measure(ctx: RankContext) -> dict[str, Any]:
    """Seconds of each kind, by threads and block; {} for a kind that this storage does not do.

    Every write is of a new file, set to its size beforehand, and ends with fsync; files are removed outside the
    timed regions. Buffered reads are of files that are not in the page cache.
    """
    raw = _RawFile(ctx, Path(ctx.task.directory) / f"storage_{ctx.process:05d}")
    found: dict[str, dict[str, float]] = {kind: {} for kind in STORAGE_KINDS}
    try:
        for write, read, direct, as_engines in (
            ("write_direct", "read_direct", True, False),
            ("write_direct_filled", "read_direct_fresh", True, True),
            ("write_buffered_fsync", "read_buffered_cold", False, False),
        ):
            if direct and not raw.takes_direct():
                continue
            for threads, block in itertools.product(*STORAGE_KINDS[write]):
                found[write][f"{threads}x{block}"] = raw.write(threads, block * MIB, direct, as_engines)
            for threads, block in itertools.product(*STORAGE_KINDS[read]):
                seconds = raw.read(threads, block * MIB, direct, as_engines)
                if seconds is not None:
                    found[read][f"{threads}x{block}"] = seconds
    finally:
        raw.remove()
    return {"seconds": found, "bytes": raw.size}


class _RawFile:
    def __init__(self, ctx: RankContext, path: Path) -> None:
        self._ctx = ctx
        self._path = path
        whole = ctx.request.storage_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        self.size = max(mmap.PAGESIZE, whole)
        self._view = _memory(_MEMORY)
        pattern = os.urandom(MIB)
        for offset in range(0, _MEMORY, MIB):
            self._view[offset : offset + MIB] = pattern

    def takes_direct(self) -> bool:
        """Whether the file system of every rank takes O_DIRECT."""
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

    def write(self, threads: int, block: int, direct: bool, filled: bool) -> float:
        """Seconds to write a new file, the final fsync included.

        `filled`: each buffer is copied from other memory just before it is written, which is in the time.
        """
        self.remove()
        self._settle()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        start = now_ns()
        fd = os.open(self._path, flags, 0o644)
        try:
            os.ftruncate(fd, self.size)
            source = self._view[_MEMORY // 2 :] if filled else None
            self._transfer(threads, block, lambda view, offset: os.pwrite(fd, view, offset), source=source)
            os.fsync(fd)
            return (now_ns() - start) / 1e9
        finally:
            os.close(fd)

    def read(self, threads: int, block: int, direct: bool, fresh: bool) -> float | None:
        """Seconds to read the file that was written last; None if it could not be got out of the page cache.

        `fresh`: into memory that was never touched, as large as the file; else into a few buffers, again and again.
        """
        error: str | None = None
        if not direct and page_cache.state_of(page_cache.drop([self._path])) != COLD:
            error = "the file stays in the page cache"
        if self._ctx.control.agree(error):
            return None
        start = now_ns()
        fd = os.open(self._path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            target = _memory(self.size) if fresh else None
            self._transfer(threads, block, lambda view, offset: os.preadv(fd, [view], offset), target=target)
            return (now_ns() - start) / 1e9
        finally:
            os.close(fd)

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
        source: memoryview | None = None,
        target: memoryview | None = None,
    ) -> None:
        """Move the whole file in blocks, each thread with a buffer of its own. Raises the OSError of a thread.

        With `source` the buffer is filled from there before each move; with `target`, as large as the file, that is
        used instead of buffers.
        """
        offsets = iter(range(0, self.size, block))
        lock = threading.Lock()
        errors: list[BaseException] = []

        def work(number: int) -> None:
            mine = self._view[number * block : (number + 1) * block]
            try:
                while True:
                    with lock:
                        offset = next(offsets, None)
                    if offset is None:
                        return
                    stop = min(block, self.size - offset)
                    view = mine if target is None else target[offset : offset + stop]
                    if source is not None:
                        start = offset % (len(source) - block)
                        np.copyto(
                            np.frombuffer(view, np.uint8)[:stop],
                            np.frombuffer(source, np.uint8)[start:][:stop],
                        )
                    done = 0
                    while done < stop:
                        done += move(view[done:stop], offset + done)
            except BaseException as exc:
                errors.append(exc)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if errors:
            raise errors[0]


def _memory(size: int) -> memoryview:
    """Aligned memory, in huge pages: direct transfers from and to scattered small pages are slower."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
