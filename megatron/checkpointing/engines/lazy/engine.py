"""This project's own engine: asynchronous saves through direct I/O, one safetensors file per rank, parallel loads.

The parts: format (the file), writer (a save), host_cache (its memory), reader (a load); shared_format and shared_save,
where several ranks share a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron.checkpointing.engines import codec
from megatron.checkpointing.engines.base import (
    CheckpointEngine,
    EngineOptions,
    FilePart,
    FileState,
    PendingSave,
    PlacedTensor,
    SavedCheckpoint,
    SavedFile,
    SaveTargets,
    note_loaded,
    refuse_duplicates,
)
from megatron.checkpointing.engines.errors import CheckpointDamagedError, EngineUnavailableError, reading
from megatron.checkpointing.engines.lazy import format as lazy_format
from megatron.checkpointing.engines.lazy import header as lazy_header
from megatron.checkpointing.engines.lazy import shared_format
from megatron.checkpointing.engines.lazy.arena import Arena
from megatron.checkpointing.engines.lazy.host_cache import DEFAULT_IO_THREADS, STREAMING_THREADS, HostCache
from megatron.checkpointing.engines.lazy.placement_check import check_placement
from megatron.checkpointing.engines.lazy.reader import Wanted, open_checked, read_tensors
from megatron.checkpointing.engines.lazy.shared_save import SharedSave
from megatron.checkpointing.engines.lazy.writer import LazySave, StreamedSave
from megatron.config.errors import ConfigError
from megatron.fileio import compressed_blocks
from megatron.fileio.checksums import CheckedBytes
from megatron.fileio.compressed_files import SUFFIX as COMPRESSED
from megatron.fileio.device_copies import CopyStream
from megatron.fileio.extents import BLOCK
from megatron.fileio.host_buffers import STAGING_BUFFERS, Buffer, cut
from megatron.fileio.pinned_memory import PinningError, pinned_memory, why_pinning_failed
from megatron.fileio.ranged_reader import DIRECT_THREADS
from restart_trace.recorder import Operation

_HEADER_THREADS = 8


_Part = tuple[Path, tuple[FilePart, ...]]  # a file, or the part of a shared one


class LazyEngine(CheckpointEngine):
    """Captures metadata when a save begins, then copies and writes in the background while training computes.

    What is not copied yet when the optimizer is about to step is copied then.
    """

    name = "lazy"
    asynchronous: ClassVar[bool] = True
    wants_placements: ClassVar[bool] = True
    loads_in_place: ClassVar[bool] = True
    redistributable: ClassVar[bool] = True
    streams: ClassVar[bool] = True

    def __init__(self, options: EngineOptions) -> None:
        """Raises ConfigError if --host-cache-size is too small for the threads and blocks."""
        super().__init__(options)
        self._io_threads = options.io_threads or (STREAMING_THREADS if options.saves_to_store else DEFAULT_IO_THREADS)
        self._cache = HostCache(
            options.io_block_bytes, self._io_threads, options.host_cache_bytes, options.local_world_size
        )
        self._arena = Arena()
        self._not_pinned: str | None = None  # why pinning the buffers of loads failed

    def prepare_memory(self, save_bytes: int, available: int, stream: CopyStream, op: Operation) -> None:
        size = 2 * (self.options.io_threads or DIRECT_THREADS) * BLOCK  # two blocks for each reading thread
        try:
            with op.span("host_memory", "pin") as span:
                staging = pinned_memory(size, stream.pins)
                span.bytes = size
        except PinningError as exc:
            self._not_pinned = f"the buffers of loads: {why_pinning_failed(exc, 0, size)}"
            return
        with op.span("host_memory", "bus"):
            op.measure(**stream.measure_bus(Buffer(staging)))
        STAGING_BUFFERS.add(cut(staging, BLOCK))
        if save_bytes:
            self._cache.pin_ahead(save_bytes, available, stream.pins, op)

    def memory_is_ready(self) -> bool:
        if self._not_pinned is not None:
            problem = f"host memory could not be pinned: {self._not_pinned}"
            raise ConfigError(f"--checkpoint-engine {self.name}: {problem}; or use engine torch")
        return self._cache.is_pinned()

    def wait_for_memory(self) -> None:
        self._cache.wait_until_pinned()
        self.memory_is_ready()

    def check_can_save(self) -> None:
        if self._compresses and not compressed_blocks.is_available():
            raise EngineUnavailableError(
                f"--checkpoint-compression zstd: package {compressed_blocks.PACKAGE} is not installed; "
                f"pip install {compressed_blocks.PACKAGE} (the extra `compression`), or drop the flag"
            )

    @property
    def _compresses(self) -> bool:
        return self.options.compress_files and not self.keeps_in_memory

    def begin_save(self, files: Sequence[FileState], directory: Path, op: Operation) -> PendingSave:
        captured = self._captured(files, op)
        path = directory / self._file_name()
        if self.shares_files:
            return SharedSave(captured, path, self.options, self._cache, op)
        return LazySave(captured, path, self.options, self._cache, op)

    @property
    def shares_files(self) -> bool:
        return self.options.files_per_node is not None and not self.keeps_in_memory

    def place_parts(self, parts: Sequence[shared_format.Room]) -> list[shared_format.Place]:
        return shared_format.place_parts(parts)

    def _file_name(self) -> str:
        options = self.options
        if not self.shares_files or options.files_per_node is None:
            return lazy_format.file_name(options.rank) + (COMPRESSED if self._compresses else "")
        return shared_format.file_name(
            options.rank, options.local_rank, options.local_world_size, options.files_per_node
        )

    def begin_streamed_save(self, files: Sequence[FileState], targets: SaveTargets, op: Operation) -> PendingSave:
        return StreamedSave(self._captured(files, op), self._file_name(), targets, self.options, self._cache, op)

    def _captured(self, files: Sequence[FileState], op: Operation) -> lazy_format.Captured:
        with op.span("serialize", file=self._file_name()):
            refuse_duplicates(files)
            captured = lazy_format.capture(files, self.options.checksum)
            self._cache.prepare(captured.contents.data_bytes)
            return captured

    def reads_ranges_of(self, files: Iterable[SavedFile]) -> bool:
        return self.options.verify_checksums

    def load(self, names: Sequence[str], checkpoint: SavedCheckpoint, op: Operation) -> dict[str, Any]:
        """As CheckpointEngine.load. Tensors are views of the page cache, or of an arena that a later load reuses.

        The arena is reused only once no tensor refers to it.
        """
        return self.load_into([FileState(name, {}) for name in names], checkpoint, op)

    def load_into(self, live: Sequence[FileState], checkpoint: SavedCheckpoint, op: Operation) -> dict[str, Any]:
        """As CheckpointEngine.load_into: live tensors are filled in place; others are as from `load`."""
        names = [file.name for file in live]
        opened: dict[_Part, lazy_format.Contents] = {}
        holder: dict[str, _Part] = {}
        for name in names:
            path, file = self._file_of(name, checkpoint)
            part = holder[name] = (path, file.parts)
            if part not in opened:
                opened[part] = open_checked(path, file, self.options, checkpoint.ranged, op)
        with op.span("load", "deserialize", joined=True):
            wanted = []
            for part, contents in opened.items():
                path = part[0]
                mine = [name for name in names if holder[name] == part]
                wanted.append(Wanted(path, contents, [e for name in mine for e in contents.tensors_of(name)]))
            targets: dict[str, torch.Tensor] = {}
            for file in live:
                tensors = codec.split(file.state)[1]
                targets |= {f"{file.name}/{name}": tensor for name, tensor in tensors.items()}
        read, compressed_bytes = read_tensors(wanted, targets, self._arena, self.options, checkpoint.ranged, op)
        with op.span("load", "deserialize", joined=True):
            states = {name: _join(name, opened[holder[name]], holder[name][0], read) for name in names}
        num_bytes = sum(contents.header_bytes for contents in opened.values())
        num_bytes += sum(e.num_bytes for item in wanted if item.contents.compressed is None for e in item.entries)
        note_loaded(num_bytes + compressed_bytes, len({path for path, _ in opened}), op)
        return states

    def placed_tensors(self, checkpoint: SavedCheckpoint, op: Operation) -> list[PlacedTensor]:
        saved = [file for name, file in sorted(checkpoint.files.items()) if lazy_header.is_lazy_file(name)]
        files = [(checkpoint.path(file.name), part) for file in saved for part in file.split()]
        with ThreadPoolExecutor(_HEADER_THREADS) as pool:
            opened = list(
                pool.map(lambda item: open_checked(item[0], item[1], self.options, checkpoint.ranged, op), files)
            )
        return [
            self._placed(path, contents.data_start, entry, entry.placement)
            for (path, _), contents in zip(files, opened, strict=True)
            for entry in contents.entries.values()
            if entry.placement is not None
        ]

    def _placed(
        self, path: Path, data_start: int, entry: lazy_format.TensorEntry, placement: dict[str, Any]
    ) -> PlacedTensor:
        with reading(path):
            check_placement(placement, math.prod(entry.shape))
        start = data_start + entry.start
        checked = None
        if self.options.verify_checksums and entry.crc32 is not None:
            checked = CheckedBytes(f"tensor {entry.name}", start, start + entry.num_bytes, int(entry.crc32, 16))
        return PlacedTensor(path, entry.name, entry.dtype, start, placement, checked)

    def load_values(self, name: str, checkpoint: SavedCheckpoint, op: Operation) -> Any:
        path, file = self._file_of(name, checkpoint)
        contents = open_checked(path, file, self.options, checkpoint.ranged, op)
        entries = contents.tensors_of(name)
        wanted = Wanted(path, contents, [entry for entry in entries if entry.placement is None])
        options = replace(self.options, io_threads=1)  # a few kilobytes
        tensors, _ = read_tensors([wanted], {}, self._arena, options, checkpoint.ranged, op)
        for entry in entries:
            if entry.placement is not None:
                tensors[path, entry.name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return _join(name, contents, path, tensors)

    def end_loads(self) -> None:
        self._arena.clear()

    def close(self) -> None:
        self._cache.clear()
        self._arena.clear()

    @staticmethod
    def _file_of(name: str, checkpoint: SavedCheckpoint) -> tuple[Path, SavedFile]:
        """The file that holds the state called `name`; of a shared file only the part that does."""
        files = checkpoint.parts_holding(name)
        if len(files) != 1:
            raise CheckpointDamagedError(
                f"{checkpoint.directory}: {len(files)} files of its manifest hold {name}; engine lazy needs one"
            )
        return checkpoint.path(files[0].name), files[0]


def _join(name: str, contents: lazy_format.Contents, path: Path, tensors: Mapping[tuple[Path, str], Any]) -> Any:
    if name not in contents.states:
        raise CheckpointDamagedError(f"{path}: does not hold {name}")
    prefix = name + "/"
    mine = {entry.name.removeprefix(prefix): tensors[path, entry.name] for entry in contents.tensors_of(name)}
    with reading(path):
        try:
            return codec.join(contents.states[name], mine)
        except codec.SkeletonError as exc:
            raise CheckpointDamagedError(f"{path}: {name}: {exc}") from exc
