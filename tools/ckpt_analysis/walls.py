"""Wall time of each rank's operation, how long it blocked training, and how much of it is accounted for."""

from __future__ import annotations

import polars as pl

from tools.ckpt_analysis.intervals import busy, clip
from tools.ckpt_analysis.phases import coverage, spread_over_ranks
from tools.ckpt_analysis.results import Spread

_RANK = ["group", "rank"]


def rank_walls(operations: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Per group and rank: wall_ns (null if unfinished), blocked_ns, covered_ns.

    blocked_ns is the union of the blocking spans. covered_ns is what the spans account for within the
    operation: the blocking ones, and those in the background while training goes on.
    """
    blocked = busy(spans.filter("blocking"), _RANK).select(*_RANK, pl.col("union_ns").alias("blocked_ns"))
    inside = clip(spans, "operation_start_ns", "operation_end_ns")
    covered = busy(inside, _RANK).select(*_RANK, pl.col("busy_ns").alias("covered_ns"))
    return (
        operations.select(*_RANK, (pl.col("end_ns") - pl.col("start_ns")).alias("wall_ns"))
        .join(blocked, on=_RANK, how="left")
        .join(covered, on=_RANK, how="left")
        .with_columns(pl.col("blocked_ns", "covered_ns").fill_null(0))
    )


def with_critical(walls: pl.DataFrame) -> pl.DataFrame:
    """Members of each group: group, rank, critical (the rank with the longest wall time; null if unknown)."""
    longest = (
        walls.filter(pl.col("wall_ns").is_not_null())
        .sort("group", "rank")
        .filter(pl.col("wall_ns") == pl.col("wall_ns").max().over("group"))
        .group_by("group")
        .agg(pl.col("rank").min().alias("critical"))
    )
    return walls.select(_RANK).join(longest, on="group", how="left")


def finished_spread(walls: pl.DataFrame, values: pl.Expr) -> dict[int, Spread]:
    """Spread of `values` (ns, computed from the columns of `walls`) over the finished ranks of each group."""
    finished = walls.filter(pl.col("wall_ns").is_not_null())
    table = finished.select(*_RANK, values.alias("busy_ns"))
    spreads = spread_over_ranks(table, with_critical(finished), ["group"])
    return {key[0]: spread for key, spread in spreads.items()}


def lowest_coverage(walls: pl.DataFrame) -> dict[int, tuple[float, int]]:
    """(coverage, rank) of the rank with the lowest coverage among the finished ranks of each group."""
    lowest: dict[int, tuple[float, int]] = {}
    finished = walls.filter(pl.col("wall_ns").is_not_null()).sort("group", "rank")
    ratio = pl.col("covered_ns") / pl.col("wall_ns")
    share = pl.when(pl.col("wall_ns") > 0).then(ratio).otherwise(1.0).alias("share")
    for group, rank, covered, wall in (
        finished.with_columns(share)
        .filter(pl.col("share") == pl.col("share").min().over("group"))
        .select(*_RANK, "covered_ns", "wall_ns")
        .iter_rows()
    ):
        lowest.setdefault(group, (coverage(covered, wall), rank))
    return lowest
