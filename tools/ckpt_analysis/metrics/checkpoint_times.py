"""When the checkpoints of a run began to count."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from ..model.frame import Frames
from .results import OperationStats


def usable_since_ns(frames: Frames, saves: Sequence[OperationStats]) -> list[tuple[OperationStats, int]]:
    """Each save whose checkpoint can be used, and since when, in Unix ns: its commit, else its end if it ended well."""
    of_group = frames.operations.group_by("group").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    times = {group: (start_ns, end_ns) for group, start_ns, end_ns in of_group.iter_rows()}
    found = []
    for save in saves:
        start_ns, end_ns = times.get(save.group, (None, None))
        if save.committed_s is not None and start_ns is not None:
            found.append((save, start_ns + round(save.committed_s * 1e9)))
        elif save.outcome == "ok" and end_ns is not None:
            found.append((save, end_ns))
    return found
