"""The reads of one rank in a load onto another layout: plans them, tells the other ranks of them, carries them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from megatron.checkpointing.engines.errors import damaged_files
from megatron.checkpointing.reshard.runs import merged, positions
from megatron.checkpointing.reshard.targets import Transfer
from megatron.checkpointing.reshard.verifying import Share, Shares, joined, to_verify
from megatron.fileio.checksums import CheckedBytes, RangeChecksum
from megatron.fileio.compressed_blocks import MOST_BYTES
from megatron.fileio.compressed_files import SUFFIX as COMPRESSED
from megatron.fileio.extents import BLOCK, GAP, FilePlan, bounds, extents, file_plan, with_checks
from megatron.fileio.open_files import RangedFiles
from megatron.fileio.ranged_reader import Label, Targets, open_all, read_ranges
from restart_trace.recorder import Operation

_LABEL = Label(copy=("redistribute", "reshard"), threads="redistribute-io")


class Reading:
    """What one rank reads: planned when it is made, told to the others by `share`, then carried out by `run`."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        file_bytes: Mapping[Path, int],
        direct_io: str,
        threads: int | None,
        block: int = BLOCK,
        gap: int = GAP,
        bring: Callable[[str, Sequence[tuple[int, int]]], Path] | None = None,
        ranged: RangedFiles | None = None,
        names: Mapping[Path, str] | None = None,
    ) -> None:
        """`file_bytes`: size of each file, as it was saved. `direct_io`, `threads` as --direct-io, --io-threads.

        `bring`: as that of FileCopies, for files that are not where their paths say. `names`: of files in the directory
        of the checkpoint; None for those of their paths. No two files have one name.

        `block`, `gap`: see megatron.fileio.extents; those of `ranged` count, which opens what is no file on this node.
        """
        self.bytes_read = 0
        targets = [transfer.target.reshape(-1).view(torch.uint8) for transfer in transfers]
        self._targets = Targets(targets, {})
        self._ranged = ranged
        self._plans = _by_file(transfers, block, gap, ranged)
        self._names = names or {plan.path: plan.path.name for plan in self._plans}
        self._checked = self._checked_by_file(transfers)
        self._file_bytes = file_bytes
        self._direct_io = direct_io
        self._threads = threads
        self._bring = bring

    @property
    def num_files(self) -> int:
        return len(self._plans)

    def share(self) -> Share:
        """What is read of which file, for all ranks to know."""
        reads = {}
        for plan in self._plans:
            _, starts, stops = bounds(plan)
            reads[self._names[plan.path]] = merged([positions(starts, stops)])
        return Share(reads, self._checked)

    def run(self, shares: Shares, rank: int, op: Operation) -> list[RangeChecksum]:
        """Fill the targets; returns the CRC-32s of what this rank is to verify.

        `shares`: those that this rank needs. Raises CheckpointDamagedError if a file is shorter than it was, or
        OSError.
        """
        with op.span("redistribute", "reshard"):
            checks = {name: (found.full, found.length) for name, found in to_verify(shares, rank).items()}
            parts = [
                extent for plan in self._plans for extent in extents(with_checks(plan, *checks[self._names[plan.path]]))
            ]
        with ExitStack() as stack, damaged_files():
            sizes = {plan.path: self._file_bytes[plan.path] for plan in self._plans}
            if self._bring is None:
                files = open_all(sizes, self._direct_io, stack, self._ranged)
            else:
                wanted: dict[Path, list[tuple[int, int]]] = {path: [] for path in sizes}
                for part in parts:
                    wanted[part.path].append((part.start, part.stop))
                places = {path: self._bring(self._names[path], wanted[path]) for path in sizes}
                opened = open_all({places[path]: size for path, size in sizes.items()}, self._direct_io, stack)
                files = {path: opened[places[path]] for path in sizes}
            found = read_ranges(parts, files, self._targets, self._threads, _LABEL, op, self._names)
        self.bytes_read = found.num_bytes
        return joined(found.checksums, shares)

    def _checked_by_file(self, transfers: Sequence[Transfer]) -> dict[str, dict[int, CheckedBytes]]:
        found: dict[str, dict[int, CheckedBytes]] = {}
        for transfer in transfers:
            checked = transfer.source.checked
            if checked is not None:
                found.setdefault(self._names[transfer.source.path], {})[checked.start] = checked
        return found


def _by_file(transfers: Sequence[Transfer], block: int, gap: int, ranged: RangedFiles | None) -> list[FilePlan]:
    """All that is copied of each file."""
    copies: dict[Path, list[tuple[int, object, object, object]]] = {}
    for i, transfer in enumerate(transfers):
        copy = i, transfer.file_offset, transfer.target_offset, transfer.num_bytes
        copies.setdefault(transfer.source.path, []).append(copy)
    plans = []
    for path, mine in copies.items():
        if ranged is not None:
            with closing(ranged(path)) as file:
                block, gap = file.block, file.gap
        of_file = max(gap, MOST_BYTES) if path.suffix == COMPRESSED else gap  # a block is restored completely
        plans.append(file_plan(path, mine, block=block, gap=of_file))
    return plans
