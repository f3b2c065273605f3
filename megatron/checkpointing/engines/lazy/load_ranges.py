"""What engine `lazy` reads of its files: stretches of them, the tensors that lie there, and where their bytes go."""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.lazy.format import Contents, TensorEntry
from megatron.fileio.direct_files import ALIGNMENT, align_up

_GAP = 1 << 16  # bytes that are cheaper to read along than to leave out

Key = tuple[Path, str]  # file, name of a tensor in it


@dataclass(frozen=True)
class Wanted:
    """Tensors to read from one file, by their place in it."""

    path: Path
    contents: Contents
    entries: Sequence[TensorEntry]


@dataclass
class Range:
    """A stretch [start, stop) of a file, aligned at both ends, in which its entries lie whole; and where it goes.

    That is `memory`, or with `live` (name -> bytes of a live tensor) these.
    """

    path: Path
    start: int
    stop: int
    entries: list[TensorEntry] = field(default_factory=list)
    data_start: int = 0
    memory: Any = None  # uint8 array that holds the stretch from its byte `at` on
    at: int = 0
    mapping: mmap.mmap | None = None  # of the file, where `memory` is the page cache
    live: dict[str, torch.Tensor] | None = None

    def view(self, start: int, stop: int) -> memoryview:
        """The memory of [start, stop) of the file."""
        return self.memory[self.at + start - self.start : self.at + stop - self.start].data

    def blocks(self, step: int) -> list[Block]:
        """The stretch in blocks of at most `step` bytes."""
        return [(self, at, min(at + step, self.stop)) for at in range(self.start, self.stop, step)]

    def pieces(self, start: int, stop: int) -> Iterator[tuple[TensorEntry, int, int]]:
        """(entry, first, last) of the tensor bytes in [start, stop) of the file; offsets within the file."""
        first = bisect.bisect_right(self.entries, start - self.data_start, key=lambda entry: entry.stop)
        for entry in self.entries[first:]:
            a, b = entry.start + self.data_start, entry.stop + self.data_start
            if a >= stop:
                return
            yield entry, max(a, start), min(b, stop)

    def destinations(self, start: int, stop: int) -> list[tuple[torch.Tensor, int]]:
        """Where the block [start, stop) goes in live tensors: (their bytes, offset in the block)."""
        assert self.live is not None
        return [
            (self.live[entry.name][first - base : last - base], first - start)
            for entry, first, last in self.pieces(start, stop)
            for base in [entry.start + self.data_start]
        ]

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor of an entry, as a view of `memory`."""
        start = entry.start + self.data_start
        array = self.memory[self.at + start - self.start :][: entry.num_bytes]
        return torch.from_numpy(array).view(entry.dtype).reshape(entry.shape)


Block = tuple[Range, int, int]  # bytes [start, stop) of the file, within the range


def ranges_of(wanted: Sequence[Wanted]) -> list[Range]:
    """Stretches that hold the wanted tensors, of which those without elements need none."""
    ranges: list[Range] = []
    for item in wanted:
        base = item.contents.data_start
        current: Range | None = None
        for entry in sorted((e for e in item.entries if e.num_bytes), key=lambda e: e.start):
            start, stop = (entry.start + base) // ALIGNMENT * ALIGNMENT, align_up(entry.stop + base)
            if current is None or start > current.stop + _GAP:
                current = Range(item.path, start, stop, data_start=base)
                ranges.append(current)
            current.stop = max(current.stop, stop)
            current.entries.append(entry)
    return ranges


def fits(tensor: torch.Tensor | None, entry: TensorEntry) -> bool:
    """Whether `entry` can be read into `tensor`: of its type and shape, and its elements in order."""
    if tensor is None or tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
        return False
    return tensor.is_contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, which they share."""
    return tensor.reshape(-1).view(torch.uint8)
