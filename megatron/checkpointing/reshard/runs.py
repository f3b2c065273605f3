"""Where the elements of a parameter lie in what holds a part of it: the arithmetic of every redistribution.

A parameter is flattened row by row. What a tensor holds of it is a list of runs: elements [full, full + length) of the
parameter lie at [held, held + length) of the tensor. Two layouts meet in the intersection of their runs.

Plain sets of positions, such as the bytes of a file that a rank reads, are runs whose `held` is their `full`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Runs:
    """Runs in the order of `full`, none of which overlap there; all in elements."""

    full: Array
    held: Array
    length: Array

    @property
    def numel(self) -> int:
        return int(self.length.sum())

    def __len__(self) -> int:
        return len(self.full)


def make_runs(full: Any, held: Any, length: Any) -> Runs:
    """Runs of three sequences of the same length, in any order."""
    arrays = [np.asarray(values, dtype=np.int64).reshape(-1) for values in (full, held, length)]
    order = np.argsort(arrays[0], kind="stable")
    return Runs(*(array[order] for array in arrays))


def slice_runs(shape: Sequence[int], dim: int | None, ranges: Sequence[Sequence[int]] | None) -> Runs:
    """Runs of the concatenation of `ranges` ([start, stop) each) along `dim` of a parameter of full `shape`.

    `dim` None: the whole parameter.
    """
    if dim is None or ranges is None:
        return make_runs([0], [0], [math.prod(shape)])
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    starts = np.array([start for start, _ in ranges], dtype=np.int64)
    widths = np.array([stop - start for start, stop in ranges], dtype=np.int64)
    before = np.cumsum(widths) - widths  # of each range, along `dim` of the local tensor
    rows = np.arange(outer, dtype=np.int64)[:, None]
    return make_runs(
        (rows * shape[dim] + starts) * inner,
        (rows * widths.sum() + before) * inner,
        np.broadcast_to(widths * inner, (outer, len(ranges))),
    )


def clip(runs: Runs, start: int, numel: int, offset: int) -> Runs:
    """The part of `runs` that is held in [start, start + numel), which lies at `offset` of another tensor."""
    first = np.maximum(runs.held, start)
    last = np.minimum(runs.held + runs.length, start + numel)
    kept = last > first
    first, last = first[kept], last[kept]
    return Runs(runs.full[kept] + first - runs.held[kept], first - start + offset, last - first)


def parts_of(placement: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The fragments of a placement (megatron.checkpointing.state.shard_metadata); of a weight's, that itself."""
    return placement.get("fragments", [placement])


def part_runs(part: Mapping[str, Any]) -> Runs:
    """Where the elements of one of `parts_of` lie in the tensor."""
    whole = slice_runs(part["shape"], part["dim"], part["ranges"])
    return clip(whole, part["start"], part["numel"], part["offset"]) if "offset" in part else whole


@dataclass(frozen=True)
class Copies:
    """Elements [source, source + length) of one thing are to become [target, target + length) of another."""

    source: Array
    target: Array
    length: Array

    def __len__(self) -> int:
        return len(self.source)


def intersect(source: Runs, target: Runs) -> Copies:
    """What the two have in common, in the order of the parameter."""
    first = np.searchsorted(source.full + source.length, target.full, side="right")
    last = np.searchsorted(source.full, target.full + target.length, side="left")
    counts = np.maximum(last - first, 0)
    of_target = np.repeat(np.arange(len(target)), counts)
    of_source = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[of_target]
    start = np.maximum(source.full[of_source], target.full[of_target])
    stop = np.minimum(
        source.full[of_source] + source.length[of_source], target.full[of_target] + target.length[of_target]
    )
    return Copies(
        source.held[of_source] + start - source.full[of_source],
        target.held[of_target] + start - target.full[of_target],
        stop - start,
    )


def subtract(runs: Runs, covered: Runs) -> Runs:
    """The elements of `runs` that are not in `covered`, by their place in the parameter."""
    # Between one covered stretch and the next, and before the first and after the last, nothing is covered.
    ends = int(max((runs.full + runs.length).max(initial=0), (covered.full + covered.length).max(initial=0)))
    starts = np.concatenate(([0], covered.full + covered.length))
    stops = np.concatenate((covered.full, [ends]))
    free = stops > starts
    gaps = Runs(starts[free], starts[free], (stops - starts)[free])
    common = intersect(runs, gaps)
    return Runs(common.target, common.source, common.length)


def union(first: Runs, second: Runs) -> Runs:
    """Both together; they must not overlap in the parameter. What `held` means is lost."""
    return make_runs(
        np.concatenate((first.full, second.full)),
        np.concatenate((first.held, second.held)),
        np.concatenate((first.length, second.length)),
    )


def positions(starts: Any, stops: Any) -> Runs:
    """The set of positions in [start, stop) of each pair; they must not overlap."""
    starts = np.asarray(starts, dtype=np.int64)
    return make_runs(starts, starts, np.asarray(stops, dtype=np.int64) - starts)


def merged(sets: Sequence[Runs]) -> Runs:
    """The positions that are in any of `sets`, in as few runs as can be."""
    starts = np.concatenate([found.full for found in sets] or [np.empty(0, dtype=np.int64)])
    stops = np.concatenate([found.full + found.length for found in sets] or [starts])
    if not len(starts):
        return positions(starts, stops)
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    first = np.flatnonzero(np.concatenate(([True], starts[1:] > stops[:-1])))
    last = np.append(first[1:], len(starts)) - 1
    return positions(starts[first], stops[last])
