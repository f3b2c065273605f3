"""The bytes of a state and nothing else, in one file per rank, per host, or for all ranks (`raw-rank`, ...).

These leave out what engines add, so that they differ only in how many ranks share a file. Each saves and loads through
the trainer's writer as an engine does, with fsync and commit; the trainer does not offer them.

A file begins with a table, JSON after its length in 8 bytes: process -> [start, length] of its extent. An extent is a
header of the same form (skeletons of the states, names, types and shapes of their tensors) and the tensors in order.
All of them begin at multiples of 4096.
"""

from __future__ import annotations

import json
import math
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpointing.engines import codec
from megatron.checkpointing.engines.base import (
    CheckpointEngine,
    EngineOptions,
    FileState,
    SavedCheckpoint,
    SavedFile,
    note_loaded,
    note_saved,
)
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.fileio.direct_files import align_up, aligned_memory, allocate, open_direct, read_all, write_all
from megatron.fileio.files import sync_file
from restart_trace.recorder import Operation

from .plan import RAW_ALL, RAW_RANK

_THREADS = 4
_LENGTH = 8  # bytes of the length of a header
_TABLE_ENTRY = 64  # bytes of the JSON of an extent, at most
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class RawEngine(CheckpointEngine):
    """`name` says which ranks share a file. `sizes_of_all`: collective, gathers the value of each process, in order."""

    name = "raw"

    def __init__(self, options: EngineOptions, name: str, sizes_of_all: Callable[[int], list[int]]) -> None:
        super().__init__(options)
        self._kind = name
        self._sizes_of_all = sizes_of_all

    def save(self, files: Sequence[FileState], directory: Path, op: Operation) -> list[SavedFile]:
        with op.span("serialize"):
            header, tensors = _described(files)
        with op.span("device_to_host"):
            parts = [np.frombuffer(header, np.uint8), *map(_bytes_of, tensors)]
        length = sum(align_up(len(part)) for part in parts)
        with op.span("barrier"):
            sizes = self._sizes_of_all(length)
        mine = self._sharing(len(sizes))
        table, starts, total = _table({process: sizes[process] for process in mine})
        path, leads = directory / self._file_name(), mine[0] == self.options.rank
        with op.span("flush", "write", file=path.name) as span:
            fd, direct = open_direct(path, os.O_RDWR | os.O_CREAT, self.options.direct_io)
            try:
                if leads:
                    if direct:
                        allocate(fd, total)
                    os.ftruncate(fd, total)
                    parts, first = [table, *parts], 0
                else:
                    first = starts[self.options.rank]
                written = span.bytes = self._move(fd, first, parts, write=True)
                with op.span("flush", "fsync", file=path.name):
                    if self.options.fsync:
                        sync_file(fd)
            finally:
                os.close(fd)
        saved = note_saved([SavedFile(path.name, total, "none")] if leads else [], self.options, op)
        op.bytes = written  # the table, too
        return saved

    def load(self, names: Sequence[str], checkpoint: SavedCheckpoint, op: Operation) -> dict[str, Any]:
        path = checkpoint.path(self._file_name())
        fd, _ = open_direct(path, os.O_RDONLY, self.options.direct_io)
        try:
            with op.span("load", "read", file=path.name) as span:
                table, _ = _header_at(fd, 0, path)
                start, length = table[str(self.options.rank)]
                header, first = _header_at(fd, start, path)
                span.bytes = first
            with op.span("load", "deserialize", file=path.name):
                tensors = [torch.empty(shape, dtype=codec.DTYPES[dtype]) for _, _, dtype, shape in header["tensors"]]
            with op.span("load", "read", file=path.name) as span:
                span.bytes = self._move(fd, start + first, [_bytes_of(tensor) for tensor in tensors], write=False)
        finally:
            os.close(fd)
        note_loaded(length, 1, op)
        with op.span("load", "deserialize", file=path.name):
            found: dict[str, dict[str, torch.Tensor]] = {name: {} for name in header["states"]}
            for (state, name, _, _), tensor in zip(header["tensors"], tensors, strict=True):
                found[state][name] = tensor
            return {name: codec.join(header["states"][name], found[name]) for name in names}

    def _sharing(self, processes: int) -> list[int]:
        """The processes whose extents are in the file of this process."""
        rank, of_host = self.options.rank, self.options.local_world_size
        if self._kind == RAW_RANK:
            return [rank]
        if self._kind == RAW_ALL:
            return list(range(processes))
        first = rank // of_host * of_host
        return list(range(first, min(first + of_host, processes)))

    def _file_name(self) -> str:
        rank, of_host = self.options.rank, self.options.local_world_size
        if self._kind == RAW_ALL:
            return "all.raw"
        return f"rank_{rank:05d}.raw" if self._kind == RAW_RANK else f"host_{rank // of_host:05d}.raw"

    def _move(self, fd: int, start: int, parts: Sequence[Bytes], *, write: bool) -> int:
        """Write the parts in sequence from `start` on, or read them; returns the bytes moved. Raises OSError."""
        block = align_up(self.options.io_block_bytes)
        pieces = _Pieces(parts)
        threads = self.options.io_threads or _THREADS
        buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(threads):
            buffers.put(aligned_memory(block))

        def move(offset: int) -> None:
            buffer = buffers.get()
            view = buffer[: min(block, pieces.length - offset)]
            if write:
                pieces.copy(view, offset, out=True)
                write_all(fd, view, start + offset)
            else:
                if read_all(fd, view, start + offset) < len(view):
                    raise CheckpointDamagedError(f"a raw file ends before byte {start + offset + len(view)}")
                pieces.copy(view, offset, out=False)
            buffers.put(buffer)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(move, range(0, pieces.length, block)))
        return pieces.length


class _Pieces:
    """Parts in sequence, each beginning at a multiple of the alignment."""

    def __init__(self, parts: Sequence[Bytes]) -> None:
        self._parts = [part for part in parts if len(part)]
        lengths = [align_up(len(part)) for part in self._parts]
        self._starts = np.concatenate([[0], np.cumsum(lengths)]) if lengths else np.zeros(1, np.int64)
        self.length = int(self._starts[-1])

    def copy(self, view: memoryview, offset: int, *, out: bool) -> None:
        """Copy between `view` and the parts from `offset` on: to the view if `out`, with zeros between the parts."""
        there = np.frombuffer(view, np.uint8)
        if out:
            there[:] = 0
        index = int(np.searchsorted(self._starts, offset, side="right")) - 1
        while index < len(self._parts) and self._starts[index] < offset + len(view):
            part, start = self._parts[index], int(self._starts[index])
            first, last = max(offset, start), min(offset + len(view), start + len(part))
            if first < last:
                target, source = there[first - offset : last - offset], part[first - start : last - start]
                np.copyto(*((target, source) if out else (source, target)))
            index += 1


def _described(files: Sequence[FileState]) -> tuple[bytes, list[torch.Tensor]]:
    """(the header of an extent, its tensors in order)."""
    states, entries, tensors = {}, [], []
    for file in files:
        states[file.name], mine = codec.split(file.state)
        for name, tensor in mine.items():
            entries.append([file.name, name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
            tensors.append(tensor)
    return _with_length({"states": states, "tensors": entries}), tensors


def _with_length(content: Any) -> bytes:
    text = json.dumps(content).encode()
    return len(text).to_bytes(_LENGTH, "little") + text


def _table(sizes: dict[int, int]) -> tuple[Bytes, dict[int, int], int]:
    """(the table, where each extent begins, bytes of the file) of extents of these sizes."""
    position = room = align_up(_LENGTH + _TABLE_ENTRY * len(sizes))
    starts = {}
    for process, size in sizes.items():
        starts[process] = position
        position += size
    text = _with_length({str(process): [starts[process], size] for process, size in sizes.items()})
    return np.frombuffer(text.ljust(room, b"\0"), np.uint8), starts, position


def _header_at(fd: int, start: int, path: Path) -> tuple[Any, int]:
    """(a header, its bytes in the file). Raises CheckpointDamagedError if there is none."""
    view = aligned_memory(align_up(_LENGTH))
    read_all(fd, view, start)
    length = _LENGTH + int.from_bytes(view[:_LENGTH], "little")
    room = align_up(length)
    if room > os.fstat(fd).st_size:
        raise CheckpointDamagedError(f"{path}: has no header at byte {start}")
    view = aligned_memory(room)
    read_all(fd, view, start)
    try:
        return json.loads(bytes(view[_LENGTH:length])), room
    except ValueError as exc:
        raise CheckpointDamagedError(f"{path}: its header at byte {start} is damaged: {exc}") from exc


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a tensor on the CPU, or a copy of a tensor on another device."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if math.prod(flat.shape) else np.empty(0, np.uint8)
