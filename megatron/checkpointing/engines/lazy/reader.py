"""Loading for engine `lazy`: parallel reads straight to where the bytes belong, checksums as blocks arrive.

Live tensors are filled in place: block by block through a few buffers that are used again and again, so that no
memory is touched for the first time and none is needed for a copy of the state; for CUDA the buffers are pinned.
Blocks that lie in the page cache are copied from there (`--direct-io auto`).

Parameters and moments (what has a placement) that have no live tensor get one on the device where the others are. The
small rest gets memory of its own on the host: where it lies in the page cache (`--direct-io auto`), that is its
memory; else an aligned arena, which is read into around the page cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from megatron.checkpointing.engines.base import EngineOptions
from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.lazy.arena import Arena
from megatron.checkpointing.engines.lazy.load_ranges import (
    Block,
    Key,
    Range,
    Wanted,
    bytes_of,
    fits,
    ranges_of,
)
from megatron.checkpointing.engines.lazy.load_thread import STEP, LoadThread
from megatron.fileio.checksums import RangeChecksum, by_start, combine
from megatron.fileio.open_files import OpenFile
from restart_trace.recorder import Operation

_DIRECT_THREADS = 8
# Reading into the page cache is mostly waiting, for the storage and for memory: more threads than for direct reads.
_MAPPING_THREADS = 12


class Reader:
    """One load. `read` may be called once."""

    def __init__(self, options: EngineOptions, op: Operation) -> None:
        self._options = options
        self._op = op
        self._device = torch.device("cpu")
        self._lock = threading.Lock()
        self._checksums: dict[Path, list[RangeChecksum]] = {}
        self._error: BaseException | None = None

    def read(
        self, wanted: Sequence[Wanted], live: Mapping[str, torch.Tensor], arena: Arena
    ) -> dict[Key, torch.Tensor]:
        """The tensors by (file, name): those of `live` that fit, filled; others anew.

        Raises CheckpointDamagedError naming file and tensor, or OSError.
        """
        tensors = {
            (i.path, e.name): torch.empty(e.shape, dtype=e.dtype)
            for i in wanted
            for e in i.entries
            if not e.num_bytes
        }
        in_place = self._in_place(wanted, live, tensors)
        hosted = ranges_of(
            [replace(i, entries=[e for e in i.entries if (i.path, e.name) not in tensors]) for i in wanted]
        )
        files: dict[Path, OpenFile] = {}
        try:
            for item in wanted:
                files[item.path] = OpenFile(item.path, item.contents.file_bytes, self._options.direct_io)
            self._give_memory(hosted, files, arena)
            self._run_threads([*in_place, *hosted], files)
        finally:
            for file in files.values():
                file.close()
        self._check(wanted)
        return tensors | {(r.path, entry.name): r.tensor(entry) for r in hosted for entry in r.entries}

    def _in_place(
        self, wanted: Sequence[Wanted], live: Mapping[str, torch.Tensor], tensors: dict[Key, torch.Tensor]
    ) -> list[Range]:
        """Stretches of what goes to live tensors, or to new ones beside these; their tensors join `tensors`."""
        found = {
            (item.path, entry.name): live[entry.name]
            for item in wanted
            for entry in item.entries
            if entry.num_bytes and fits(live.get(entry.name), entry)
        }
        self._device = next((t.device for t in found.values() if t.device.type == "cuda"), self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what is still to be done to them, such as filling them
        found |= {
            (item.path, entry.name): torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
            for item in wanted
            for entry in item.entries
            if entry.num_bytes and entry.placement is not None and (item.path, entry.name) not in found
        }
        ranges = ranges_of(
            [replace(i, entries=[e for e in i.entries if (i.path, e.name) in found]) for i in wanted]
        )
        for stretch in ranges:
            stretch.live = {e.name: bytes_of(found[stretch.path, e.name]) for e in stretch.entries}
        tensors |= found
        return ranges

    def _give_memory(self, ranges: Sequence[Range], files: dict[Path, OpenFile], arena: Arena) -> None:
        """The page cache itself to what lies there (--direct-io auto); to the others the arena, one after the other."""
        size = 0
        for stretch in ranges:
            if files[stretch.path].can_be_mapped(stretch.start, stretch.stop):
                stretch.mapping = files[stretch.path].map()
                stretch.memory = np.frombuffer(stretch.mapping, dtype=np.uint8)
                stretch.at = stretch.start
            else:
                stretch.at = size
                size += stretch.stop - stretch.start
        memory = arena.take(size)
        for stretch in ranges:
            if stretch.mapping is None:
                stretch.memory = memory

    def _run_threads(self, ranges: Sequence[Range], files: dict[Path, OpenFile]) -> None:
        """Let the I/O threads read all blocks: a share each of what is mapped, and the others as they come."""
        mapped: list[Block] = []
        others: list[Block] = []
        step = min(STEP, self._options.io_block_bytes)
        for stretch in ranges:
            through_cache = stretch.mapping is not None or files[stretch.path].only_mapped
            (mapped if through_cache else others).extend(stretch.blocks(step))
        queue = iter(others)
        count = self._options.io_threads or (_DIRECT_THREADS if others else _MAPPING_THREADS)
        readers = [LoadThread(self._options, files, self._device) for _ in range(count)]
        shares = [mapped[len(mapped) * i // count : len(mapped) * (i + 1) // count] for i in range(count)]
        threads = [
            threading.Thread(
                target=self._run, args=(reader, self._next_blocks(share, queue)), name=f"lazy-io-{i}"
            )
            for i, (reader, share) in enumerate(zip(readers, shares, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        for reader in readers:
            for path, checksums in reader.checksums.items():
                self._checksums.setdefault(path, []).extend(checksums)

    def _next_blocks(self, share: Sequence[Block], queue: Iterator[Block]) -> Iterator[Block]:
        """What a thread has to read, until something fails."""
        for block in share:
            if self._error is not None:
                return
            yield block
        while self._error is None:
            with self._lock:
                block = next(queue, None)
            if block is None:
                return
            yield block

    def _run(self, reader: LoadThread, blocks: Iterator[Block]) -> None:
        try:
            reader.run(blocks, self._op)
        except BaseException as exc:
            self._error = self._error or exc

    def _check(self, wanted: Sequence[Wanted]) -> None:
        """Raises CheckpointDamagedError if a tensor does not have the checksum it was saved with."""
        if not self._options.verify_checksums:
            return
        for item in wanted:
            checksums = by_start(self._checksums.get(item.path, ()))
            base = item.contents.data_start
            for entry in item.entries:
                if entry.crc32 is None:
                    continue
                found = combine(checksums, base + entry.start, base + entry.stop)
                if f"{found.crc32:08x}" != entry.crc32:
                    raise CheckpointDamagedError(
                        f"{item.path}: tensor {entry.name} does not have the checksum it was saved with"
                    )
