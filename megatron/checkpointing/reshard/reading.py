"""Carries out a redistribution: reads the planned bytes of a checkpoint's files, in parallel, into the live tensors.

Each thread reads stretches of the files through a buffer of its own and copies from there, so the memory needed beside
the tensors is `threads` x BLOCK. No rank reads a byte twice, and what lies between the wanted bytes only where it is
short. A stretch is verified and copied while it is in the processor's cache.

With `--direct-io auto` what lies in the page cache is copied from there.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.checkpointing.engines.errors import damaged_files
from megatron.checkpointing.reshard.runs import Array, Runs, merged, positions
from megatron.checkpointing.reshard.targets import Transfer
from megatron.checkpointing.reshard.verifying import Share, joined, to_verify
from megatron.fileio.checksums import CheckedBytes, RangeChecksum, range_checksum
from megatron.fileio.direct_files import ALIGNMENT, align_up, aligned_memory
from megatron.fileio.open_files import OpenFile, ReadAhead
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

BLOCK = 2 << 20  # bytes read at a time: of a grid over the file, so that a stretch lies within one cell
GAP = 1 << 16  # bytes that are cheaper to read along than to leave out
THREADS = 8
_CHECK = -1  # in the place of a target: bytes to take the CRC-32 of


@dataclass(frozen=True)
class _FilePlan:
    """The pieces to copy out of one file or to verify, in its order; `target` indexes the tensors of all transfers."""

    path: Path
    file_offset: Array
    target_offset: Array
    num_bytes: Array
    target: Array


class _Rows(NamedTuple):
    """`count` rows of `length` bytes, in regular steps, to copy to byte `to` of target number `target` and on."""

    target: int
    start: int  # byte in the file
    to: int
    length: int
    count: int
    step: int  # bytes from row to row in the file
    target_step: int


class _Stretch(NamedTuple):
    """The bytes [start, stop) of a file, which are read together: what to copy of them, and what to verify."""

    path: Path
    start: int
    stop: int
    rows: list[_Rows]
    checks: list[tuple[int, int]]  # byte in the file, number of bytes


class Reading:
    """What one rank reads: planned when it is made, told to the others by `share`, then carried out by `run`."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        file_bytes: Mapping[Path, int],
        direct_io: str,
        threads: int | None,
    ) -> None:
        """`file_bytes`: size of each file, as it was saved. `direct_io` as in --direct-io; `threads` None: THREADS."""
        self.bytes_read = 0
        self._targets = [transfer.target.reshape(-1).view(torch.uint8) for transfer in transfers]
        self._plans = _by_file(transfers)
        self._checked = _checked_by_file(transfers)
        self._file_bytes = file_bytes
        self._direct_io = direct_io
        self._threads = threads or THREADS

    @property
    def num_files(self) -> int:
        return len(self._plans)

    def share(self) -> Share:
        """What is read of which file, for all ranks to know."""
        reads = {}
        for plan in self._plans:
            _, starts, stops = _bounds(plan)
            reads[plan.path.name] = merged([positions(starts, stops)])
        return Share(reads, self._checked)

    def run(self, shares: Sequence[Share], rank: int, op: Operation) -> list[RangeChecksum]:
        """Fill the targets; returns the CRC-32s of what this rank is to verify.

        `shares`: of all ranks. Raises CheckpointDamagedError if a file is shorter than it was, or OSError.
        """
        with op.span("redistribute", "reshard"):
            checks = to_verify(shares, rank)
            stretches = [
                stretch
                for plan in self._plans
                for stretch in _stretches(_with_checks(plan, checks[plan.path.name]))
            ]
        files: dict[Path, OpenFile] = {}
        try:
            with damaged_files():
                for plan in self._plans:
                    files[plan.path] = OpenFile(plan.path, self._file_bytes[plan.path], self._direct_io)
                pool = _Pool(stretches, files, self._targets, op)
                pool.run(self._threads)
        finally:
            for file in files.values():
                file.close()
        self.bytes_read = pool.bytes_read
        return joined(pool.pieces, shares)


def _checked_by_file(transfers: Sequence[Transfer]) -> dict[str, dict[int, CheckedBytes]]:
    found: dict[str, dict[int, CheckedBytes]] = {}
    for transfer in transfers:
        checked = transfer.source.checked
        if checked is not None:
            found.setdefault(transfer.source.path.name, {})[checked.start] = checked
    return found


def _with_checks(plan: _FilePlan, checks: Runs) -> _FilePlan:
    """The same plan, and `checks` are to be read, if they are not, and verified."""
    nowhere = np.zeros(len(checks), dtype=np.int64)
    return _cut(
        _FilePlan(
            plan.path,
            np.concatenate((plan.file_offset, checks.full)),
            np.concatenate((plan.target_offset, nowhere)),
            np.concatenate((plan.num_bytes, checks.length)),
            np.concatenate((plan.target, nowhere + _CHECK)),
        )
    )


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
        plans.append(_cut(_FilePlan(path, offset, target_offset, num_bytes, target)))
    return plans


def _cut(plan: _FilePlan) -> _FilePlan:
    """The same bytes, in the order of the file, in pieces of which none crosses a line of the grid."""
    first, last = plan.file_offset // BLOCK, (plan.file_offset + plan.num_bytes - 1) // BLOCK
    counts = last - first + 1
    of = np.repeat(np.arange(len(counts)), counts)
    cell = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[of]
    start = np.maximum(plan.file_offset[of], cell * BLOCK)
    stop = np.minimum(plan.file_offset[of] + plan.num_bytes[of], (cell + 1) * BLOCK)
    moved = plan.target_offset[of] + start - plan.file_offset[of]
    order = np.argsort(start, kind="stable")
    return _FilePlan(plan.path, start[order], moved[order], (stop - start)[order], plan.target[of][order])


def _bounds(plan: _FilePlan) -> tuple[Array, Array, Array]:
    """What is read together, pieces of one cell of the grid with no more than GAP between them.

    First piece, first byte and end of each such stretch.
    """
    ends = np.maximum.accumulate(plan.file_offset + plan.num_bytes)
    apart = plan.file_offset[1:] - ends[:-1] > GAP
    other_cell = plan.file_offset[1:] // BLOCK != plan.file_offset[:-1] // BLOCK
    firsts = np.concatenate(([0], np.flatnonzero(apart | other_cell) + 1))
    return firsts, plan.file_offset[firsts], ends[np.append(firsts[1:], len(ends)) - 1]


def _stretches(plan: _FilePlan) -> list[_Stretch]:
    """All stretches of a file, in its order."""
    firsts, starts, stops = _bounds(plan)
    found = [
        _Stretch(plan.path, start, stop, [], [])
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
    ]
    of = np.repeat(np.arange(len(firsts)), np.diff(np.append(firsts, len(plan.file_offset))))
    for i in np.flatnonzero(plan.target == _CHECK).tolist():
        found[of[i]].checks.append((int(plan.file_offset[i]), int(plan.num_bytes[i])))
    for stretch, rows in _rows(plan, of):
        found[stretch].rows.append(rows)
    return found


def _rows(plan: _FilePlan, of: Array) -> Iterator[tuple[int, _Rows]]:
    """What is to be copied, by number of the stretch; `of`: that of each piece.

    For a whole file at once: the threads that read share one interpreter, and pieces are many.
    """
    copied = np.flatnonzero(plan.target != _CHECK)
    key = of[copied] * (plan.target.max() + 1) + plan.target[copied]  # a stretch, and a target in it
    order = np.argsort(key, kind="stable")
    copied = copied[order]
    pieces = plan.file_offset[copied], plan.target_offset[copied], plan.num_bytes[copied]
    for i, count, *steps in _progressions(*pieces, key[order]):
        start, to, length = (int(array[i]) for array in pieces)
        yield int(of[copied[i]]), _Rows(int(plan.target[copied[i]]), start, to, length, count, *steps)


def _progressions(
    source: Array, target: Array, length: Array, key: Array
) -> Iterator[tuple[int, int, int, int]]:
    """Pieces as few regular patterns: (first piece, how many, step in the source, step in the target).

    Those of a pattern have the same length and the same `key`.
    """
    source_step, target_step = np.diff(source), np.diff(target)
    same = (length[1:] == length[:-1]) & (key[1:] == key[:-1])
    goes_on = same.copy()  # whether piece i + 1 continues what the pieces i - 1 and i began
    goes_on[1:] &= (source_step[1:] == source_step[:-1]) & (target_step[1:] == target_step[:-1])
    ends = np.flatnonzero(~goes_on).tolist()
    begins = same.tolist()
    i = 0
    while i < len(source):
        if i < len(begins) and begins[i]:  # the first two are a pattern whatever came before
            after = bisect.bisect_left(ends, i + 1)
            count = (ends[after] if after < len(ends) else len(source) - 1) - i + 1
            yield i, count, int(source_step[i]), int(target_step[i])
        else:
            count = 1
            yield i, count, 0, 0
        i += count


class _Pool:
    """Threads that read stretches."""

    def __init__(
        self,
        stretches: Sequence[_Stretch],
        files: dict[Path, OpenFile],
        targets: list[torch.Tensor],
        op: Operation,
    ) -> None:
        self.bytes_read = 0
        self.pieces: list[RangeChecksum] = []
        self._queue = iter(stretches)
        self._files = files
        self._targets = targets
        self._on_cpu = all(target.device.type == "cpu" for target in targets)
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
        started, reading, verifying, copying, moved = now_ns(), 0, 0, 0, 0
        pieces: list[RangeChecksum] = []
        try:
            buffer, ahead = aligned_memory(BLOCK + ALIGNMENT), ReadAhead()
            while (stretch := self._next()) is not None:
                began = now_ns()
                path, start = stretch.path, stretch.start // ALIGNMENT * ALIGNMENT
                stop = start + align_up(stretch.stop - start)
                if self._on_cpu and self._files[path].can_be_mapped(start, stop):
                    view = ahead.read(path, start, stop)
                    moved += len(view)
                else:
                    view = buffer[: stop - start]
                    moved += self._files[path].read(view, start)
                read = now_ns()
                pieces += _checksums(view, stretch, start)
                verified = now_ns()
                block = np.frombuffer(view, dtype=np.uint8)
                for rows in stretch.rows:
                    _copy_rows(block, start, self._targets[rows.target], rows)
                reading, verifying = reading + read - began, verifying + verified - read
                copying += now_ns() - verified
        except BaseException as exc:
            self._error = self._error or exc
        ended = now_ns()
        self._op.add("load", "read", started, ended, duration_ns=reading, num_bytes=moved)
        if pieces:
            self._op.add("load", "verify", started, ended, duration_ns=verifying)
        self._op.add("redistribute", "reshard", started, ended, duration_ns=copying)
        with self._lock:
            self.pieces += pieces
            self.bytes_read += moved

    def _next(self) -> _Stretch | None:
        with self._lock:
            return None if self._error is not None else next(self._queue, None)


def _checksums(block: memoryview, stretch: _Stretch, start: int) -> Iterator[RangeChecksum]:
    """Of what is to be verified of a stretch; `block` begins at byte `start` of the file."""
    for at, length in stretch.checks:
        yield range_checksum(stretch.path.name, at, block[at - start : at - start + length])


def _copy_rows(block: np.ndarray[Any, Any], start: int, target: torch.Tensor, rows: _Rows) -> None:
    """Copy `rows` from `block`, which begins at byte `start` of the file. `target` is uint8, of one dimension."""
    _, at, to, length, count, step, target_step = rows
    at -= start
    if target.device.type != "cpu":
        taken = torch.from_numpy(block).as_strided((count, length), (step, 1), at)
        target.as_strided((count, length), (target_step, 1), target.storage_offset() + to).copy_(taken)
    elif count == 1:
        target.numpy()[to : to + length] = block[at : at + length]
    else:
        strided = np.lib.stride_tricks.as_strided
        into = strided(target.numpy()[to:], (count, length), (target_step, 1))
        np.copyto(into, strided(block[at:], (count, length), (step, 1)))
