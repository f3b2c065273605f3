"""Training lost by a failure: the iterations after the checkpoint that the next cycle loaded."""

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
    lost = iterations.filter((pl.col("cycle") < cycle) & (pl.col("step") > resumed_step) & (pl.col("step") <= reached))
    newest = lost.filter(pl.col("cycle") == pl.col("cycle").max().over("rank", "step"))
    per_rank = newest.group_by("rank").agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("spent_ns"))
    return 0.0 if per_rank.is_empty() else per_rank.select(pl.col("spent_ns").max()).item() / 1e9


def repeated_losses(iterations: pl.DataFrame, cycle: int) -> pl.DataFrame:
    """Steps of `cycle` that an earlier cycle had trained: step, loss, loss_before (in the newest such cycle).

    Of each cycle the lowest rank that recorded a loss counts: a loss is the same on all ranks.
    """
    now = _losses(iterations, pl.col("cycle") == cycle)
    before = _losses(iterations, pl.col("cycle") < cycle, pl.col("step").is_in(now["step"].implode()))
    return now.join(before.rename({"loss": "loss_before"}), on="step", how="inner").sort("step")


def _losses(iterations: pl.DataFrame, *which: pl.Expr) -> pl.DataFrame:
    """step and loss of the iterations `which`, of the newest cycle and in it of the lowest rank that recorded one."""
    known = iterations.filter(pl.col("loss").is_not_null(), *which)
    return known.group_by("step").agg(pl.col("loss").sort_by("cycle", "rank", descending=[True, False]).first())
