"""Loading for engine `lazy`: decides which bytes of its files are read into which memory.

Live tensors are filled in place. Parameters and moments (tensors with a placement) that have no live tensor get a new
one on the device of the others. The remaining small tensors are put into host memory: they stay in the page cache if
they are there (`--direct-io auto`); otherwise they are read into an aligned arena, bypassing the page cache.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpointing.engines.base import EngineOptions, FilePart, SavedFile, check_size
from megatron.checkpointing.engines.errors import (
    CheckpointDamagedError,
    EngineUnavailableError,
    NoChecksumsError,
    damaged_files,
    reading,
)
from megatron.checkpointing.engines.lazy import header as lazy_header
from megatron.checkpointing.engines.lazy.arena import Arena
from megatron.checkpointing.engines.lazy.format import Compressed, Contents, TensorEntry, decode, header_checksum
from megatron.checkpointing.engines.lazy.shared_format import decode_part
from megatron.fileio import compressed_blocks
from megatron.fileio.checksums import RangeChecksum, by_file, combine, crc32
from megatron.fileio.compressed_files import CompressedFile
from megatron.fileio.direct_files import ALIGNMENT, align_up, aligned_memory
from megatron.fileio.extents import GAP, FilePlan, extents, file_plan
from megatron.fileio.objects.parts import PART_BYTES
from megatron.fileio.open_files import RangedFile, RangedFiles
from megatron.fileio.ranged_reader import Label, Targets, open_all, open_ranged, read_ranges
from restart_trace.recorder import Operation

Key = tuple[Path, str]  # file, name of a tensor in it

_LARGE = 4 << 20  # bytes from which a new tensor has huge pages
_LABEL = Label(copy=("load", "host_to_device"), threads="lazy-io")


@dataclass(frozen=True)
class Wanted:
    """Tensors to read from one file."""

    path: Path
    contents: Contents
    entries: Sequence[TensorEntry]

    def of(self, entries: Iterable[TensorEntry]) -> Wanted:
        """The same file, other tensors of it."""
        return Wanted(self.path, self.contents, list(entries))


@dataclass
class _Range:
    """Bytes [start, stop) of a file, aligned at both ends, which contain `entries` completely; and their memory.

    They go to `memory` from its byte `at` on; it belongs to `mapping` if they are used in the page cache.
    """

    item: Wanted
    start: int
    stop: int
    entries: list[TensorEntry] = field(default_factory=list)
    memory: Any = None
    at: int = 0
    mapping: mmap.mmap | None = None

    @property
    def end(self) -> int:
        """`stop`, or the end of the file if that is before it."""
        return min(self.stop, self.item.contents.file_bytes)

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor of an entry, as a view of `memory`."""
        first = self.at + self.item.contents.data_start + entry.start - self.start
        array = self.memory[first : first + entry.num_bytes]
        return torch.from_numpy(array).view(entry.dtype).reshape(entry.shape)


def open_checked(
    path: Path, file: SavedFile, options: EngineOptions, ranged: RangedFiles | None, op: Operation
) -> Contents:
    """What the file at `path` holds, by its header, which is that of `file`; of a shared file the only part of `file`.

    `ranged`: as in SavedCheckpoint.

    Raises CheckpointDamagedError naming `path`, or OSError.
    """
    _check_package(path)
    if ranged is None:
        check_size(path, file)
    with reading(path):
        with op.span("load", "read", file=path.name) as span:
            header, compressed = _read_header(path, file, options.direct_io, ranged)
            span.bytes = sum(map(len, header)) if compressed is None else compressed.header_bytes
        with op.span("load", "deserialize", file=path.name):
            contents = _parse(header, path, file, options, compressed)
    if ranged is not None and any(entry.crc32 is None for entry in contents.entries.values()):
        raise NoChecksumsError(f"{path}: was saved with --checksum none")
    return contents


def _check_package(path: Path) -> None:
    """Raises EngineUnavailableError if what restores a compressed file is missing: the file is not damaged."""
    if lazy_header.is_compressed(path.name) and not compressed_blocks.is_available():
        raise EngineUnavailableError(
            f"{path}: is compressed, and package {compressed_blocks.PACKAGE}, which restores it, is not installed; "
            f"pip install {compressed_blocks.PACKAGE} (the extra `compression`)"
        )


def _read_header(
    path: Path, file: SavedFile, direct_io: str, ranged: RangedFiles | None
) -> tuple[list[bytes], Compressed | None]:
    """The extents of the header that tell of what `file` is to give; and how it is compressed, if it is."""
    if file.parts:
        return lazy_header.read_part_header(path, file.parts[0], ranged), None
    if not lazy_header.is_compressed(path.name):
        return [lazy_header.read_header(path, ranged)], None
    opened = open_ranged(path, file.num_bytes, direct_io, ranged)
    assert isinstance(opened, CompressedFile)
    header = lazy_header.read_header(path, lambda path: opened)
    return [header], Compressed(file.num_bytes, opened.read_bytes, opened.num_bytes)


def _parse(
    header: Sequence[bytes], path: Path, file: SavedFile, options: EngineOptions, compressed: Compressed | None
) -> Contents:
    if file.parts:
        if options.verify_checksums:
            _verify_header(header, path, file.parts[0])
        return decode_part(header, file, path)
    if options.verify_checksums:
        found = header_checksum(header[0])
        if found != file.checksum:
            raise CheckpointDamagedError(f"{path}: header checksum {found}, but {file.checksum} was saved")
    contents = decode(header[0], path)
    saved_bytes = file.num_bytes if compressed is None else compressed.original_bytes
    if contents.file_bytes != saved_bytes:
        raise CheckpointDamagedError(
            f"{path}: its header describes {contents.file_bytes} bytes, but {saved_bytes} were saved"
        )
    return replace(contents, compressed=compressed)


def _verify_header(header: Sequence[bytes], path: Path, part: FilePart) -> None:
    for text, extent in zip(header, part.header, strict=True):
        found = f"{crc32(text):08x}"
        if found != extent.crc32:
            raise CheckpointDamagedError(
                f"{path}: bytes {extent.start} to {extent.stop}, of the header of rank {part.rank}'s part, have the "
                f"checksum {found}, but {extent.crc32} was saved"
            )


def read_tensors(
    wanted: Sequence[Wanted],
    live: Mapping[str, torch.Tensor],
    arena: Arena,
    options: EngineOptions,
    ranged: RangedFiles | None,
    op: Operation,
) -> tuple[dict[Key, torch.Tensor], int]:
    """The tensors by (file, name): those of `live` that fit are filled, others new. `ranged`: as in SavedCheckpoint.

    The number is that of the bytes read of compressed files. Raises CheckpointDamagedError naming file and tensor, or
    OSError.
    """
    with ExitStack() as stack, damaged_files():
        with op.span("load", "deserialize", joined=True):  # opening, planning and allocating
            sizes = {item.path: item.contents.stored_bytes for item in wanted}
            files = open_all(sizes, options.direct_io, stack, ranged)
            tensors = _tensors_to_fill(wanted, live, files)
            hosted = _ranges([i.of(e for e in i.entries if (i.path, e.name) not in tensors) for i in wanted])
            _give_memory(hosted, files, arena)
            targets = [_bytes_of(tensor) for tensor in tensors.values()]
            mappings = {len(targets) + i: r.mapping for i, r in enumerate(hosted) if r.mapping is not None}
            targets += [torch.from_numpy(r.memory) for r in hosted]
            plans = [
                *_plans_in_place(wanted, tensors, files, options),
                *_plans_of(hosted, len(tensors), files, options),
            ]
            parts = [extent for plan in plans for extent in extents(plan)]
        found = read_ranges(parts, files, Targets(targets, mappings), options.io_threads, _LABEL, op)
    with op.span("load", "deserialize"):
        if options.verify_checksums:
            _verify(wanted, found.checksums)
        read = tensors | {(r.item.path, entry.name): r.tensor(entry) for r in hosted for entry in r.entries}
        return read, sum(file.read_bytes for file in files.values() if isinstance(file, CompressedFile))


def _tensors_to_fill(
    wanted: Sequence[Wanted], live: Mapping[str, torch.Tensor], files: Mapping[Path, RangedFile]
) -> dict[Key, torch.Tensor]:
    """The live tensors that fit, and new tensors for the other entries that have a placement or no elements."""
    entries = [(item, entry) for item in wanted for entry in item.entries]
    found: dict[Key, torch.Tensor] = {}
    for item, entry in entries:
        if not entry.num_bytes:
            found[item.path, entry.name] = torch.empty(entry.shape, dtype=entry.dtype)
        elif _fits(live.get(entry.name), entry):
            found[item.path, entry.name] = live[entry.name]
    device = next((t.device for t in found.values() if t.device.type != "cpu"), torch.device("cpu"))
    for item, entry in entries:
        if entry.placement is not None and (item.path, entry.name) not in found:
            start = item.contents.data_start + entry.start
            found[item.path, entry.name] = _new_tensor(entry, start, files[item.path], device)
    return found


def _new_tensor(entry: TensorEntry, start: int, file: RangedFile, device: torch.device) -> torch.Tensor:
    """A tensor for the bytes of the file from `start` on.

    A large tensor on the CPU that is read directly gets huge pages, and the alignment that it has in the file, so that
    almost all of it is read into it without a copy. (Copying to huge pages that are touched for the first time is
    slow.)
    """
    direct = file.is_read_directly(start, start + entry.num_bytes)
    if device.type != "cpu" or entry.num_bytes < _LARGE or not direct:
        return torch.empty(entry.shape, dtype=entry.dtype, device=device)
    ahead = start % ALIGNMENT
    memory = aligned_memory(ahead + entry.num_bytes)[ahead:]
    return torch.frombuffer(memory, dtype=torch.uint8).view(entry.dtype).reshape(entry.shape)


def _fits(tensor: torch.Tensor | None, entry: TensorEntry) -> bool:
    """Whether `entry` can be read into `tensor`: same type and shape, and contiguous."""
    if tensor is None or tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
        return False
    return tensor.is_contiguous()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, which they share."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _ranges(wanted: Iterable[Wanted]) -> list[_Range]:
    """Aligned ranges that hold the wanted tensors."""
    found: list[_Range] = []
    for item in wanted:
        base = item.contents.data_start
        for entry in sorted(item.entries, key=lambda e: e.start):
            start, stop = (entry.start + base) // ALIGNMENT * ALIGNMENT, align_up(entry.stop + base)
            if not found or found[-1].item is not item or start > found[-1].stop + GAP:
                found.append(_Range(item, start, stop))
            found[-1].stop = max(found[-1].stop, stop)
            found[-1].entries.append(entry)
    return found


def _give_memory(ranges: Sequence[_Range], files: Mapping[Path, RangedFile], arena: Arena) -> None:
    """The page cache itself to what lies there (--direct-io auto); to the others the arena, one after the other."""
    size = 0
    for part in ranges:
        file = files[part.item.path]
        if file.can_be_mapped(part.start, part.stop):
            part.mapping, part.at = file.map(), part.start
            part.memory = np.frombuffer(part.mapping, dtype=np.uint8)
        else:
            part.at = size
            size += part.stop - part.start
    memory = arena.take(size) if size else None
    for part in ranges:
        if part.mapping is None:
            part.memory = memory


def _plans_in_place(
    wanted: Sequence[Wanted],
    tensors: Mapping[Key, torch.Tensor],
    files: Mapping[Path, RangedFile],
    options: EngineOptions,
) -> list[FilePlan]:
    numbers = {key: number for number, key in enumerate(tensors)}
    plans = []
    for item in wanted:
        base = item.contents.data_start
        mine = [entry for entry in item.entries if (item.path, entry.name) in numbers]
        copies = [(numbers[item.path, e.name], base + e.start, 0, e.num_bytes) for e in mine]
        plans.append(file_plan(item.path, copies, _checks(item, mine, options), *_grain(files[item.path], options)))
    return plans


def _plans_of(
    ranges: Sequence[_Range], first: int, files: Mapping[Path, RangedFile], options: EngineOptions
) -> list[FilePlan]:
    """`first`: number of the first range's memory among the targets."""
    return [
        file_plan(
            part.item.path,
            [(first + i, part.start, part.at, part.end - part.start)],
            _checks(part.item, part.entries, options),
            *_grain(files[part.item.path], options),
        )
        for i, part in enumerate(ranges)
    ]


def _checks(item: Wanted, entries: Iterable[TensorEntry], options: EngineOptions) -> list[tuple[int, int]]:
    base = item.contents.data_start
    return [
        (base + entry.start, entry.num_bytes)
        for entry in entries
        if options.verify_checksums and entry.crc32 is not None
    ]


def _grain(file: RangedFile, options: EngineOptions) -> tuple[int, int]:
    """(block, gap) by which the file is divided into extents; see megatron.fileio.extents."""
    if isinstance(file, CompressedFile):  # in smaller ones a block would be restored several times
        return file.block, file.gap
    # A range of a large object is several blocks long.
    return min(file.block, options.io_block_bytes * max(1, file.block // PART_BYTES)), file.gap


def _verify(wanted: Sequence[Wanted], found: Iterable[RangeChecksum]) -> None:
    """Raises CheckpointDamagedError if a tensor does not have the checksum it was saved with."""
    known = by_file(found)
    for item in wanted:
        base, checksums = item.contents.data_start, known.get(item.path.name, {})
        for entry in item.entries:
            if entry.crc32 is None:
                continue
            crc = combine(checksums, base + entry.start, base + entry.stop).crc32
            if f"{crc:08x}" != entry.crc32:
                raise CheckpointDamagedError(
                    f"{item.path}: tensor {entry.name} does not have the checksum it was saved with"
                )
