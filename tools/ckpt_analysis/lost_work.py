"""Training that a failure undid: iterations after the checkpoint that the next cycle loaded."""

from __future__ import annotations

import polars as pl


def reached_step(iterations: pl.DataFrame, cycle: int) -> int | None:
    """Last iteration that any rank finished in the newest cycle before `cycle` that finished one."""
    earlier = iterations.filter(pl.col("cycle") < cycle)
    if earlier.is_empty():
        return None
    newest = earlier.filter(pl.col("cycle") == earlier["cycle"].max())
    return newest.select(pl.col("step").max()).item()


def lost_work_s(iterations: pl.DataFrame, cycle: int, resumed_step: int, reached: int) -> float:
    """Time spent on the iterations after `resumed_step` up to `reached`, on the rank that spent most, in s.

    An iteration that several earlier cycles ran counts as the newest of them ran it. Time between iterations
    (saves, evaluation) and the iteration under way at the failure are not in it.
    """
    lost = iterations.filter(
        (pl.col("cycle") < cycle) & (pl.col("step") > resumed_step) & (pl.col("step") <= reached)
    )
    newest = lost.filter(pl.col("cycle") == pl.col("cycle").max().over("rank", "step"))
    per_rank = newest.group_by("rank").agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("spent_ns"))
    return 0.0 if per_rank.is_empty() else per_rank.select(pl.col("spent_ns").max()).item() / 1e9
