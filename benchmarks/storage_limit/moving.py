"""Writes and reads the bytes of one rank in a Way, and times it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.storage_limit.ring import Ring
from benchmarks.storage_limit.ways import ALLOCATED, MIB, NO, TRUNCATED, Way
from megatron.fileio.checksums import crc32
from megatron.fileio.direct_files import ALIGNMENT, aligned_memory, allocate, read_all, write_all
from megatron.fileio.files import sync_directory
from restart_trace.clock import now_ns

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def new_state(size: int) -> Bytes:
    """Memory of that many random bytes, a multiple of MIB, all in use."""
    state, pattern = np.frombuffer(aligned_memory(size), np.uint8), np.frombuffer(os.urandom(MIB), np.uint8)
    for start in range(0, size, MIB):
        state[start : start + MIB] = pattern
    return state


class Buffers:
    """Aligned memory that is kept from round to round, as an engine keeps its own."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int], list[memoryview]] = {}

    def take(self, count: int, size: int) -> list[memoryview]:
        """`count` buffers of `size` bytes whose pages are there."""
        key = count, size
        if key not in self._memory:
            self._memory.clear()
            whole = aligned_memory(count * size)
            np.frombuffer(whole, np.uint8)[:] = 1
            self._memory[key] = [whole[i * size : (i + 1) * size] for i in range(count)]
        return self._memory[key]


class Move:
    """One save or load of `state` in files of `directory`."""

    def __init__(self, way: Way, state: Bytes, directory: Path, buffers: Buffers, *, write: bool) -> None:
        self._way, self._state, self._write = way, state, write
        self._buffers = buffers.take(way.workers * way.depth, way.block)
        part = len(state) // way.files
        assert part % ALIGNMENT == 0
        self._parts = [(directory / f"part_{way.files}_{i:03d}", i * part, part) for i in range(way.files)]
        self._lock = threading.Lock()

    def run(self) -> float:
        """Seconds of it, with fsync if it is a save."""
        flags = (os.O_RDWR | os.O_CREAT | os.O_EXCL) if self._write else os.O_RDONLY
        flags |= os.O_DIRECT if self._way.direct else 0
        began = now_ns()
        with ExitStack() as stack:
            opened = []
            for path, _, length in self._parts:
                fd = os.open(path, flags, 0o644)
                stack.callback(os.close, fd)
                opened.append(fd)
                self._size(fd, length)
            blocks = self._blocks(opened)
            with ThreadPoolExecutor(self._way.workers) as pool:
                work = self._through_ring if self._way.uring else self._through_calls
                list(pool.map(lambda number: work(number, blocks), range(self._way.workers)))
            if self._write:
                for fd in opened:
                    os.fsync(fd)
                sync_directory(self._parts[0][0].parent)
        return (now_ns() - began) / 1e9

    def remove(self) -> None:
        """Remove the files, where there are some."""
        for path, _, _ in self._parts:
            path.unlink(missing_ok=True)

    def drop(self) -> None:
        """Remove the files from the page cache."""
        for path, _, _ in self._parts:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def _size(self, fd: int, length: int) -> None:
        if not self._write or self._way.sized == NO:
            return
        if self._way.sized == TRUNCATED:
            os.ftruncate(fd, length)
        elif self._way.sized == ALLOCATED:
            allocate(fd, length)

    def _blocks(self, opened: list[int]) -> Iterator[tuple[int, int, int, int]]:
        """(descriptor, position in its file, position in the state, bytes) of each block."""
        block = self._way.block
        for fd, (_, first, length) in zip(opened, self._parts, strict=True):
            for at in range(0, length, block):
                yield fd, at, first + at, min(block, length - at)

    def _next(self, blocks: Iterator[tuple[int, int, int, int]]) -> tuple[int, int, int, int] | None:
        with self._lock:
            return next(blocks, None)

    def _through_calls(self, number: int, blocks: Iterator[tuple[int, int, int, int]]) -> None:
        buffer = self._buffers[number]
        while (block := self._next(blocks)) is not None:
            fd, at, first, length = block
            view = self._view(buffer, first, length)
            if self._write:
                self._fill(view, first, length)
                write_all(fd, view, at)
            else:
                read_all(fd, view, at)
                self._place(view, first, length)

    def _through_ring(self, number: int, blocks: Iterator[tuple[int, int, int, int]]) -> None:
        depth = self._way.depth
        buffers = self._buffers[number * depth : (number + 1) * depth]
        ring = Ring(depth)
        under_way: dict[int, tuple[memoryview, int, int]] = {}
        free = list(range(depth))
        try:
            while (block := self._next(blocks)) is not None:
                fd, at, first, length = block
                if not free:
                    free += self._collect(ring, under_way)
                tag = free.pop()
                view = self._view(buffers[tag], first, length)
                if self._write:
                    self._fill(view, first, length)
                under_way[tag] = view, first, length
                ring.queue(write=self._write, fd=fd, buffer=view, position=at, tag=tag)
            while under_way:
                self._collect(ring, under_way)
        finally:
            ring.close()

    def _collect(self, ring: Ring, under_way: dict[int, tuple[memoryview, int, int]]) -> list[int]:
        ended = []
        for tag, moved in ring.wait():
            view, first, length = under_way.pop(tag)
            if moved != length:
                raise OSError(f"{moved} of {length} bytes were moved")
            if not self._write:
                self._place(view, first, length)
            ended.append(tag)
        return ended

    def _view(self, buffer: memoryview, first: int, length: int) -> memoryview:
        return buffer[:length] if self._way.copied else self._state[first : first + length].data

    def _fill(self, view: memoryview, first: int, length: int) -> None:
        if self._way.copied:
            np.copyto(np.frombuffer(view, np.uint8), self._state[first : first + length])
        if self._way.checksum:
            crc32(view)

    def _place(self, view: memoryview, first: int, length: int) -> None:
        if self._way.checksum:
            crc32(view)
        if self._way.copied:
            np.copyto(self._state[first : first + length], np.frombuffer(view, np.uint8))
