"""A start of the run along its critical path: what the terminal shows first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import polars as pl

from ..model.frame import Frames
from .critical_path import PathPart, Wait, longest_wait, parts_of_path, start_path, start_windows
from .failures import failure_of
from .restart_parts import OUTSIDE, outside
from .results import StartStats


@dataclass(frozen=True)
class StartPath:
    """A start from its failure, or else from the start of its first process, to the end of the last first step.

    `outside`: part of restart_parts.OUTSIDE -> seconds until the first process of the path began; `parts` follow. They
    add up to `length_s`. `wait`: the longest wait of the other ranks for one.
    """

    cycle: int
    length_s: float
    outside: dict[str, float]
    parts: list[PathPart]
    wait: Wait | None


def shown_start(starts: Sequence[StartStats]) -> StartStats | None:
    """The newest restart; the newest first launch if there is none, or if it took more than twice as long.

    None: neither reached its first step.
    """
    restarts = [start for start in starts if start.is_restart and start.wall]
    launches = [start for start in starts if not start.is_restart and start.wall]
    if restarts and not (launches and _length_s(launches[-1]) > 2 * _length_s(restarts[-1])):
        return restarts[-1]
    return launches[-1] if launches else None


def _length_s(start: StartStats) -> float:
    assert start.wall is not None
    return start.wall.max_s if start.restart_s is None else start.restart_s


def measure_path(frames: Frames, start: StartStats | None) -> StartPath | None:
    """The path of `start`; None if the trace does not hold the phases of its ranks."""
    windows = None if start is None else start_windows(frames, start.group)
    path = [] if start is None or windows is None else start_path(frames, start.group, windows)
    if start is None or windows is None or not path:
        return None
    failure = failure_of(frames.events, start.cycle - 1) if start.restart_s is not None else None
    of_start = frames.operations.filter(pl.col("group") == start.group)
    origin_ns = min(path[0].start_ns, *of_start["start_ns"]) if failure is None else failure.began_ns
    # With clocks that differ a process may seem to have begun before the failure.
    path = [replace(part, start_ns=max(part.start_ns, origin_ns)) for part in path if part.end_ns > origin_ns]
    began_s = (path[0].start_ns - origin_ns) / 1e9
    before = {OUTSIDE[-1]: began_s} if began_s > 0 else {}
    if failure is not None:
        before = outside(failure.times, began_s, cut=True)
    return StartPath(
        start.cycle, (path[-1].end_ns - origin_ns) / 1e9, before, parts_of_path(path), longest_wait(windows)
    )
