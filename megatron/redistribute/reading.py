"""Carries out a redistribution: reads the planned bytes of a checkpoint's files, in parallel, into the live tensors.

Each thread reads stretches of the files through a buffer of its own and copies from there, so the memory needed beside
the tensors is `threads` x BLOCK. Nothing is read twice, and what lies between the wanted bytes only where it is short.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint_engines.direct_files import ALIGNMENT, align_up, aligned_memory
from megatron.checkpoint_engines.load_sources import OpenFile
from megatron.redistribute.runs import Array
from megatron.redistribute.targets import Transfer
from megatron.restart_trace.clock import now_ns
from megatron.restart_trace.recorder import Operation

BLOCK = 2 << 20  # bytes read at a time: of a grid over the file, so that a stretch lies within one cell
GAP = 1 << 16  # bytes that are cheaper to read along than to leave out
THREADS = 8


@dataclass(frozen=True)
class _FilePlan:
    """The pieces to copy out of one file, in its order; `target` indexes the tensors of all transfers."""

    path: Path
    file_offset: Array
    target_offset: Array
    num_bytes: Array
    target: Array


_Stretch = tuple[_FilePlan, int, int]  # pieces [first, last) of a file, which are read together


def read_transfers(
    transfers: Sequence[Transfer],
    file_bytes: dict[Path, int],
    direct_io: str,
    threads: int | None,
    op: Operation,
) -> int:
    """Fill the targets; returns the bytes that were copied into them.

    `file_bytes`: size of each file, as it was saved. `direct_io` as in --direct-io; `threads` None: THREADS. Raises
    CheckpointDamagedError if a file is shorter, or OSError.
    """
    targets = [transfer.target.reshape(-1).view(torch.uint8) for transfer in transfers]
    plans = _by_file(transfers)
    files: dict[Path, OpenFile] = {}
    try:
        for plan in plans:
            files[plan.path] = OpenFile(plan.path, file_bytes[plan.path], direct_io)
        _Pool(_stretches(plans), files, targets, op).run(threads or THREADS)
    finally:
        for file in files.values():
            file.close()
    return sum(int(plan.num_bytes.sum()) for plan in plans)


def _by_file(transfers: Sequence[Transfer]) -> list[_FilePlan]:
    """All pieces of each file, cut at the lines of the grid, in the order of the file."""
    plans = []
    for path in dict.fromkeys(transfer.source.path for transfer in transfers):
        mine = [(i, t) for i, t in enumerate(transfers) if t.source.path == path]
        offset, target_offset, num_bytes = (
            np.concatenate([getattr(t, name) for _, t in mine])
            for name in ("file_offset", "target_offset", "num_bytes")
        )
        target = np.concatenate([np.full(len(t.file_offset), i) for i, t in mine])
        order = np.argsort(offset, kind="stable")
        plans.append(
            _cut(_FilePlan(path, offset[order], target_offset[order], num_bytes[order], target[order]))
        )
    return plans


def _cut(plan: _FilePlan) -> _FilePlan:
    """The same bytes in pieces of which none crosses a line of the grid."""
    first, last = plan.file_offset // BLOCK, (plan.file_offset + plan.num_bytes - 1) // BLOCK
    counts = last - first + 1
    if (counts == 1).all():
        return plan
    of = np.repeat(np.arange(len(counts)), counts)
    cell = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[of]
    start = np.maximum(plan.file_offset[of], cell * BLOCK)
    stop = np.minimum(plan.file_offset[of] + plan.num_bytes[of], (cell + 1) * BLOCK)
    moved = plan.target_offset[of] + start - plan.file_offset[of]
    return _FilePlan(plan.path, start, moved, stop - start, plan.target[of])


def _stretches(plans: Sequence[_FilePlan]) -> list[_Stretch]:
    """What is read together: pieces of one cell of the grid with no more than GAP between them."""
    found: list[_Stretch] = []
    for plan in plans:
        ends = np.maximum.accumulate(plan.file_offset + plan.num_bytes)
        apart = plan.file_offset[1:] - ends[:-1] > GAP
        other_cell = plan.file_offset[1:] // BLOCK != plan.file_offset[:-1] // BLOCK
        cuts = [0, *(np.flatnonzero(apart | other_cell) + 1).tolist(), len(plan.file_offset)]
        found += [(plan, a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    return found


class _Pool:
    def __init__(
        self,
        stretches: Sequence[_Stretch],
        files: dict[Path, OpenFile],
        targets: list[torch.Tensor],
        op: Operation,
    ) -> None:
        self._queue = iter(stretches)
        self._files = files
        self._targets = targets
        self._op = op
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def run(self, count: int) -> None:
        threads = [threading.Thread(target=self._work, name=f"redistribute-io-{i}") for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        started, reading, copying, moved = now_ns(), 0, 0, 0
        try:
            buffer = aligned_memory(BLOCK + ALIGNMENT)
            while (stretch := self._next()) is not None:
                plan, first, last = stretch
                begin = now_ns()
                start = int(plan.file_offset[first]) // ALIGNMENT * ALIGNMENT
                stop = int((plan.file_offset[first:last] + plan.num_bytes[first:last]).max())
                view = buffer[: align_up(stop - start)]
                moved += self._files[plan.path].read(view, start)
                middle = now_ns()
                self._scatter(np.frombuffer(view, dtype=np.uint8), plan, first, last, start)
                reading, copying = reading + middle - begin, copying + now_ns() - middle
        except BaseException as exc:
            self._error = self._error or exc
        ended = now_ns()
        self._op.add("load", "read", started, ended, duration_ns=reading, num_bytes=moved)
        self._op.add("redistribute", "reshard", started, ended, duration_ns=copying)

    def _next(self) -> _Stretch | None:
        with self._lock:
            return None if self._error is not None else next(self._queue, None)

    def _scatter(
        self, block: np.ndarray[Any, Any], plan: _FilePlan, first: int, last: int, start: int
    ) -> None:
        """Copy the pieces [first, last) of the plan from `block`, which begins at byte `start` of the file."""
        of = plan.target[first:last]
        for target in np.unique(of).tolist():
            mine = np.flatnonzero(of == target) + first
            pieces = plan.file_offset[mine] - start, plan.target_offset[mine], plan.num_bytes[mine]
            for rows in _progressions(*pieces):
                _copy_rows(block, self._targets[target], *rows)


def _progressions(
    source: Array, target: Array, length: Array
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Pieces as few regular patterns: (source, target, length, count, step in the source, step in the target)."""
    source_step, target_step = np.diff(source), np.diff(target)
    same = length[1:] == length[:-1]
    goes_on = same.copy()  # whether piece i + 1 continues what the pieces i - 1 and i began
    goes_on[1:] &= (source_step[1:] == source_step[:-1]) & (target_step[1:] == target_step[:-1])
    ends = np.flatnonzero(~goes_on)
    i = 0
    while i < len(source):
        last = i
        if i < len(same) and same[i]:  # the first two are a pattern whatever came before
            after = np.searchsorted(ends, i + 1)
            last = int(ends[after]) if after < len(ends) else len(source) - 1
        count = last - i + 1
        steps = (int(source_step[i]), int(target_step[i])) if count > 1 else (0, 0)
        yield int(source[i]), int(target[i]), int(length[i]), count, steps[0], steps[1]
        i = last + 1


def _copy_rows(
    block: np.ndarray[Any, Any],
    target: torch.Tensor,
    source: int,
    to: int,
    length: int,
    count: int,
    source_step: int,
    target_step: int,
) -> None:
    """Copy `count` rows of `length` bytes. `target` is uint8, of one dimension."""
    if target.device.type != "cpu":
        rows = torch.from_numpy(block).as_strided((count, length), (source_step, 1), source)
        target.as_strided((count, length), (target_step, 1), target.storage_offset() + to).copy_(rows)
        return
    strided = np.lib.stride_tricks.as_strided
    into = strided(target.numpy()[to:], (count, length), (target_step, 1))
    np.copyto(into, strided(block[source:], (count, length), (source_step, 1)))
