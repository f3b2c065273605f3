"""Loading for engine `lazy`: parallel reads into memory that needs no further copy, checksums as blocks arrive.

With `--direct-io auto` the files are mapped, and threads have their pages read into the page cache, which is the
memory of the tensors: none is allocated. With `on` and `off` the tensors are views of one aligned arena, which is read
into around the page cache or through it. With a device, the parameters and optimizer state (what has a placement) go
there block by block as they arrive, through pinned buffers.
"""

from __future__ import annotations

import bisect
import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from isal import isal_zlib

from megatron.checkpoint_engines.base import EngineOptions
from megatron.checkpoint_engines.device_staging import DeviceStaging
from megatron.checkpoint_engines.direct_files import ALIGNMENT, align_up
from megatron.checkpoint_engines.errors import CheckpointDamagedError
from megatron.checkpoint_engines.host_cache import DEFAULT_IO_THREADS
from megatron.checkpoint_engines.lazy_format import Contents, TensorEntry
from megatron.checkpoint_engines.load_sources import Arena, OpenFile, ReadAhead, populate
from megatron.restart_trace.clock import now_ns
from megatron.restart_trace.recorder import Operation

_GAP = 1 << 16  # bytes that are cheaper to read along than to leave out
# Reading into the page cache is mostly waiting, for the storage and for memory: more threads than for direct reads.
_MAPPING_THREADS = 12
_MAPPED_STEP = 2 << 20  # bytes of a file that are read into the page cache, then checked while they are hot


@dataclass(frozen=True)
class Wanted:
    """Tensors to read from one file, by their place in it."""

    path: Path
    contents: Contents
    entries: Sequence[TensorEntry]


@dataclass
class _Range:
    """A stretch [start, stop) of a file, aligned at both ends, in which its entries lie whole; and where it goes.

    That is `memory`, or with `on_device` (name -> bytes of a tensor there) these.
    """

    path: Path
    start: int
    stop: int
    entries: list[TensorEntry] = field(default_factory=list)
    data_start: int = 0
    memory: Any = None  # uint8 array that holds the stretch from its byte `at` on
    at: int = 0
    mapping: mmap.mmap | None = None  # of the file, where `memory` is the page cache
    on_device: dict[str, torch.Tensor] | None = None

    def view(self, start: int, stop: int) -> memoryview:
        """The memory of [start, stop) of the file."""
        return self.memory[self.at + start - self.start : self.at + stop - self.start].data

    def pieces(self, start: int, stop: int) -> Iterator[tuple[TensorEntry, int, int]]:
        """(entry, first, last) of the tensor bytes in [start, stop) of the file; offsets within the file."""
        first = bisect.bisect_right(self.entries, start - self.data_start, key=lambda entry: entry.stop)
        for entry in self.entries[first:]:
            a, b = entry.start + self.data_start, entry.stop + self.data_start
            if a >= stop:
                return
            yield entry, max(a, start), min(b, stop)


_Block = tuple[_Range, int, int]  # bytes [start, stop) of the file, within the range


def _blocks(ranges: Sequence[_Range], step: int) -> list[_Block]:
    return [(r, at, min(at + step, r.stop)) for r in ranges for at in range(r.start, r.stop, step)]


def _ranges(wanted: Sequence[Wanted]) -> list[_Range]:
    """Stretches that hold the wanted tensors."""
    ranges: list[_Range] = []
    for item in wanted:
        base = item.contents.data_start
        current: _Range | None = None
        for entry in sorted((e for e in item.entries if e.num_bytes), key=lambda e: e.start):
            start, stop = (entry.start + base) // ALIGNMENT * ALIGNMENT, align_up(entry.stop + base)
            if current is None or start > current.stop + _GAP:
                current = _Range(item.path, start, stop, data_start=base)
                ranges.append(current)
            current.stop = max(current.stop, stop)
            current.entries.append(entry)
    return ranges


def _give_memory(ranges: Sequence[_Range], files: dict[Path, OpenFile], arena: Arena, direct_io: str) -> None:
    """The page cache itself with --direct-io auto; else the arena, one stretch after the other."""
    if direct_io == "auto":
        mappings = {path: files[path].map() for path in {found.path for found in ranges}}
        for found in ranges:
            found.mapping = mappings[found.path]
            found.memory = np.frombuffer(found.mapping, dtype=np.uint8)
            found.at = found.start
        return
    position = 0
    for found in ranges:
        found.at = position
        position += found.stop - found.start
    memory = arena.take(position)
    for found in ranges:
        found.memory = memory


class Reader:
    """One load. `read` may be called once."""

    def __init__(self, options: EngineOptions, op: Operation, device: torch.device | None) -> None:
        self._options = options
        self._op = op
        self._device = device
        self._lock = threading.Lock()
        self._crcs: dict[tuple[Path, str], list[tuple[int, int, int]]] = {}
        self._error: BaseException | None = None

    def read(self, wanted: Sequence[Wanted], arena: Arena) -> dict[tuple[Path, str], torch.Tensor]:
        """The tensors by (file, name). Raises CheckpointDamagedError naming file and tensor, or OSError."""
        tensors = {
            (i.path, e.name): torch.empty(e.shape, dtype=e.dtype)
            for i in wanted
            for e in i.entries
            if not e.num_bytes
        }
        staged = self._staged_ranges(wanted, tensors) if self._device is not None else []
        hosted = _ranges(
            [replace(i, entries=[e for e in i.entries if (i.path, e.name) not in tensors]) for i in wanted]
        )
        files: dict[Path, OpenFile] = {}
        try:
            for item in wanted:
                files[item.path] = OpenFile(item.path, item.contents.file_bytes, self._options.direct_io)
            _give_memory(hosted, files, arena, self._options.direct_io)
            self._run_threads([*staged, *hosted], files)
        finally:
            for file in files.values():
                file.close()
        self._check(wanted)
        return tensors | {(r.path, entry.name): _tensor(entry, r) for r in hosted for entry in r.entries}

    def _staged_ranges(
        self, wanted: Sequence[Wanted], tensors: dict[tuple[Path, str], torch.Tensor]
    ) -> list[_Range]:
        """Stretches that go to the device; their tensors are made there and added to `tensors`."""
        mine = [replace(i, entries=[e for e in i.entries if e.placement is not None]) for i in wanted]
        ranges = _ranges(mine)
        for stretch in ranges:
            stretch.on_device = {}
            for entry in stretch.entries:
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
                tensors[stretch.path, entry.name] = tensor
                stretch.on_device[entry.name] = tensor.reshape(-1).view(torch.uint8)
        return ranges

    def _run_threads(self, ranges: Sequence[_Range], files: dict[Path, OpenFile]) -> None:
        """Let the I/O threads read all blocks: a share of the mapped ones each, and the others as they come."""
        mapped = _blocks([r for r in ranges if r.mapping is not None], _MAPPED_STEP)
        others = iter(_blocks([r for r in ranges if r.mapping is None], self._options.io_block_bytes))
        count = self._options.io_threads or (_MAPPING_THREADS if mapped else DEFAULT_IO_THREADS)
        shares = [mapped[len(mapped) * i // count : len(mapped) * (i + 1) // count] for i in range(count)]
        threads = [
            threading.Thread(target=self._read_blocks, args=(share, others, files), name=f"lazy-io-{i}")
            for i, share in enumerate(shares)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _next_blocks(self, share: Sequence[_Block], others: Iterator[_Block]) -> Iterator[_Block]:
        """What a thread has to read, until something fails."""
        for block in share:
            if self._error is not None:
                return
            yield block
        while self._error is None:
            with self._lock:
                block = next(others, None)
            if block is None:
                return
            yield block

    def _read_blocks(
        self, share: Sequence[_Block], others: Iterator[_Block], files: dict[Path, OpenFile]
    ) -> None:
        """An I/O thread."""
        started, reading, verifying, copying, moved = now_ns(), 0, 0, 0, 0
        staging: DeviceStaging | None = None
        ahead = ReadAhead()
        try:
            for stretch, start, stop in self._next_blocks(share, others):
                first = now_ns()
                if stretch.on_device is not None:
                    if staging is None:
                        assert self._device is not None
                        staging = DeviceStaging(self._options.io_block_bytes, self._device)
                    mine = staging.next_buffer(stop - start)
                else:
                    mine = stretch.view(start, stop)
                second = now_ns()
                if stretch.mapping is not None:
                    ahead.read(stretch.path, start, stop)
                    moved += populate(stretch.mapping, start, stop)
                else:
                    moved += files[stretch.path].read(mine, start)
                third = now_ns()
                if self._options.verify_checksums:
                    self._take_checksums(stretch, start, stop, mine)
                fourth = now_ns()
                if staging is not None and stretch.on_device is not None:
                    staging.copy(_destinations(stretch, start, stop))
                reading, verifying = reading + third - second, verifying + fourth - third
                copying += second - first + now_ns() - fourth
            last = now_ns()
            if staging is not None:
                staging.finish()
                copying += now_ns() - last
        except BaseException as exc:
            self._error = self._error or exc
        ended = now_ns()
        self._op.add("load", "read", started, ended, duration_ns=reading, num_bytes=moved)
        if self._options.verify_checksums:
            self._op.add("load", "verify", started, ended, duration_ns=verifying)
        if staging is not None:
            self._op.add("load", "host_to_device", started, ended, duration_ns=copying)

    def _take_checksums(self, stretch: _Range, start: int, stop: int, view: memoryview) -> None:
        """Note the CRC-32 of every piece of a tensor in the block `view`."""
        found = []
        for entry, first, last in stretch.pieces(start, stop):
            if entry.crc32 is not None:
                crc = isal_zlib.crc32(view[first - start : last - start])
                found.append(((stretch.path, entry.name), (first, last - first, crc)))
        with self._lock:
            for key, piece in found:
                self._crcs.setdefault(key, []).append(piece)

    def _check(self, wanted: Sequence[Wanted]) -> None:
        """Raises CheckpointDamagedError if a tensor does not have the checksum it was saved with."""
        if not self._options.verify_checksums:
            return
        for item in wanted:
            for entry in item.entries:
                if entry.crc32 is None:
                    continue
                crc = 0
                for _, length, piece in sorted(self._crcs.get((item.path, entry.name), ())):
                    crc = isal_zlib.crc32_combine(crc, piece, length)
                if f"{crc:08x}" != entry.crc32:
                    raise CheckpointDamagedError(
                        f"{item.path}: tensor {entry.name} does not have the checksum it was saved with"
                    )


def _destinations(stretch: _Range, start: int, stop: int) -> list[tuple[torch.Tensor, int]]:
    """Where the block [start, stop) goes on the device: (bytes of a tensor there, offset in the block)."""
    assert stretch.on_device is not None
    return [
        (stretch.on_device[entry.name][first - base : last - base], first - start)
        for entry, first, last in stretch.pieces(start, stop)
        for base in [entry.start + stretch.data_start]
    ]


def _tensor(entry: TensorEntry, stretch: _Range) -> torch.Tensor:
    """The tensor of an entry, as a view of the memory of its stretch."""
    start = entry.start + stretch.data_start
    array = stretch.memory[stretch.at + start - stretch.start :][: entry.num_bytes]
    return torch.from_numpy(array).view(entry.dtype).reshape(entry.shape)
