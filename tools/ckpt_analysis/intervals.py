"""Time that spans account for, without counting any moment twice."""

from __future__ import annotations

import polars as pl


def clip(spans: pl.DataFrame, start: str, end: str) -> pl.DataFrame:
    """Cut spans to the window in the columns `start` and `end`; those wholly outside vanish.

    A null `end` is an open window. The duration shrinks with its span and never exceeds it.
    """
    start_ns = pl.max_horizontal("start_ns", start)
    end_ns = pl.min_horizontal("end_ns", end)  # ignores nulls
    return (
        spans.with_columns(start_ns.alias("start_ns"), end_ns.alias("end_ns"))
        .filter(pl.col("end_ns") >= pl.col("start_ns"))
        .with_columns(
            pl.min_horizontal("duration_ns", pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns")
        )
    )


def busy(spans: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Time accounted for per group of the columns `by`: `busy_ns` and `union_ns`.

    Overlapping windows form clusters. union_ns sums the lengths of the clusters. busy_ns takes from each
    cluster the sum of its durations, but at most its length: phases that alternate within one window count
    what each really took, and parallel threads count a moment once.
    """
    ordered = spans.select(*by, "start_ns", "end_ns", "duration_ns").sort(*by, "start_ns", "end_ns")
    covered_until = pl.col("end_ns").cum_max().shift(1).over(by)
    starts_cluster = (pl.col("start_ns") >= covered_until).fill_null(True)
    clusters = (
        ordered.with_columns(starts_cluster.alias("starts"))
        .with_columns(pl.col("starts").cum_sum().alias("cluster"))
        .group_by([*by, "cluster"])
        .agg(
            (pl.col("end_ns").max() - pl.col("start_ns").min()).alias("union_ns"),
            pl.col("duration_ns").sum().alias("sum_ns"),
        )
    )
    return clusters.group_by(by).agg(
        pl.min_horizontal("union_ns", "sum_ns").sum().alias("busy_ns"), pl.col("union_ns").sum()
    )
