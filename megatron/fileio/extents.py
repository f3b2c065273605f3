"""Divides the byte ranges of a file that are to be copied or verified into extents, which are read at once.

A file is divided into cells of BLOCK bytes. An extent lies within one cell and has all wanted bytes of it, with the
short gaps between them. So no byte is read twice, and bytes are verified and copied while they are in the processor's
cache.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.int64]]

BLOCK = 2 << 20  # bytes of a cell, a multiple of the alignment of direct I/O
GAP = 1 << 16  # bytes that are cheaper to read along than to leave out
_CHECK = -1  # in the place of a target: bytes to take the CRC-32 of


@dataclass(frozen=True)
class FilePlan:
    """Byte ranges of one file, in its order, none of which leaves a cell. `target` numbers what each is copied to."""

    path: Path
    file_offset: Array
    target_offset: Array
    num_bytes: Array
    target: Array
    block: int = BLOCK
    gap: int = GAP


class Rows(NamedTuple):
    """`count` rows of `length` bytes, in regular steps, to copy to byte `to` of target number `target` and on."""

    target: int
    start: int  # byte in the file
    to: int
    length: int
    count: int
    step: int  # bytes from row to row in the file
    target_step: int


class Extent(NamedTuple):
    """The bytes [start, stop) of a file, which are read at once: what to copy of them, and what to verify."""

    path: Path
    start: int
    stop: int
    rows: list[Rows]
    checks: list[tuple[int, int]]  # byte in the file, number of bytes


def file_plan(
    path: Path,
    copies: Iterable[tuple[int, Any, Any, Any]],
    checks: Iterable[tuple[Any, Any]] = (),
    block: int = BLOCK,
    gap: int = GAP,
) -> FilePlan:
    """What is to be copied and verified of the file at `path`.

    `copies`: (number of a target, bytes in the file, bytes in the target, numbers of bytes), the last three arrays of
    the same length or single numbers. `checks`: (bytes in the file, numbers of bytes) to take CRC-32s of.
    """
    parts = [*copies, *((_CHECK, start, 0, length) for start, length in checks)]
    columns: list[list[Array]] = [[], [], [], []]
    for target, *places in parts:
        start, to, length = np.broadcast_arrays(*(np.atleast_1d(np.asarray(p, np.int64)) for p in places))
        for column, values in zip(columns, (start, to, length, np.full(len(start), target)), strict=True):
            column.append(values)
    joined = [np.concatenate(column or [np.empty(0, np.int64)]) for column in columns]
    return _cut(FilePlan(path, *joined, block=block, gap=gap))


def with_checks(plan: FilePlan, starts: Array, lengths: Array) -> FilePlan:
    """The same plan, and these bytes are to be read, if they are not, and verified."""
    nowhere = np.zeros(len(starts), dtype=np.int64)
    pairs = (plan.file_offset, starts), (plan.target_offset, nowhere), (plan.num_bytes, lengths)
    columns = [np.concatenate(pair) for pair in (*pairs, (plan.target, nowhere + _CHECK))]
    return _cut(FilePlan(plan.path, *columns, block=plan.block, gap=plan.gap))


def _cut(plan: FilePlan) -> FilePlan:
    """The same bytes, in the order of the file, in pieces of which none leaves its cell."""
    kept = plan.num_bytes > 0
    offset, length = plan.file_offset[kept], plan.num_bytes[kept]
    first, last = offset // plan.block, (offset + length - 1) // plan.block
    counts = last - first + 1
    of = np.repeat(np.arange(len(counts)), counts)
    cell = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[of]
    start = np.maximum(offset[of], cell * plan.block)
    stop = np.minimum(offset[of] + length[of], (cell + 1) * plan.block)
    moved = plan.target_offset[kept][of] + start - offset[of]
    order = np.argsort(start, kind="stable")
    columns = [column[order] for column in (start, moved, stop - start, plan.target[kept][of])]
    return FilePlan(plan.path, *columns, block=plan.block, gap=plan.gap)


def bounds(plan: FilePlan) -> tuple[Array, Array, Array]:
    """The extents: first range, first byte and end of each."""
    if not len(plan.file_offset):
        return plan.file_offset, plan.file_offset, plan.file_offset
    ends = np.maximum.accumulate(plan.file_offset + plan.num_bytes)
    apart = plan.file_offset[1:] - ends[:-1] > plan.gap
    other_cell = plan.file_offset[1:] // plan.block != plan.file_offset[:-1] // plan.block
    firsts = np.concatenate(([0], np.flatnonzero(apart | other_cell) + 1))
    return firsts, plan.file_offset[firsts], ends[np.append(firsts[1:], len(ends)) - 1]


def extents(plan: FilePlan) -> list[Extent]:
    """All extents of a file, in its order."""
    firsts, starts, stops = bounds(plan)
    found = [
        Extent(plan.path, start, stop, [], []) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
    ]
    of = np.repeat(np.arange(len(firsts)), np.diff(np.append(firsts, len(plan.file_offset))))
    for i in np.flatnonzero(plan.target == _CHECK).tolist():
        found[of[i]].checks.append((int(plan.file_offset[i]), int(plan.num_bytes[i])))
    for extent, rows in _rows(plan, of):
        found[extent].rows.append(rows)
    return found


def _rows(plan: FilePlan, of: Array) -> Iterator[tuple[int, Rows]]:
    """What is to be copied, by number of the extent; `of`: that of each range.

    For a whole file at once: the threads that read share one interpreter, and ranges are many.
    """
    copied = np.flatnonzero(plan.target != _CHECK)
    key = of[copied] * (plan.target.max(initial=0) + 1) + plan.target[copied]  # an extent, and a target in it
    order = np.argsort(key, kind="stable")
    copied = copied[order]
    ranges = plan.file_offset[copied], plan.target_offset[copied], plan.num_bytes[copied]
    for i, count, *steps in progressions(*ranges, key[order]):
        start, to, length = (int(array[i]) for array in ranges)
        yield int(of[copied[i]]), Rows(int(plan.target[copied[i]]), start, to, length, count, *steps)


def progressions(source: Array, target: Array, length: Array, key: Array) -> Iterator[tuple[int, int, int, int]]:
    """Ranges as few regular patterns: (first range, how many, step in the source, step in the target).

    Those of a pattern have the same length and the same `key`.
    """
    source_step, target_step = np.diff(source), np.diff(target)
    same = (length[1:] == length[:-1]) & (key[1:] == key[:-1])
    goes_on = same.copy()  # whether range i + 1 continues what the ranges i - 1 and i began
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
