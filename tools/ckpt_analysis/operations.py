"""Saves and loads: what each took over all ranks, how long training was blocked, when it was durable."""

from __future__ import annotations

import polars as pl

from tools.ckpt_analysis.frame import Frames
from tools.ckpt_analysis.phases import phase_stats, rank_stats, throughput_GBps
from tools.ckpt_analysis.results import OperationStats, PhaseStats
from tools.ckpt_analysis.walls import finished_spread, lowest_coverage, rank_walls, with_critical

# The details of a commit after which the checkpoint counts; pruning old ones comes later.
_COMMITTING = ("manifest", "publish")


def measure(frames: Frames, operation: str, *, per_rank: bool) -> list[OperationStats]:
    """Statistics of every `operation` ("save" or "load"), in the order in which they began."""
    operations = frames.operations.filter(pl.col("operation") == operation)
    spans = frames.spans.filter(pl.col("operation") == operation)
    details = spans.filter(pl.col("detail").is_not_null())
    walls = rank_walls(operations, spans)
    phases = phase_stats(spans, details, with_critical(walls), operation)
    ranks = rank_stats(spans, details, walls) if per_rank else {}
    wall = finished_spread(walls, pl.col("wall_ns"))
    rest = finished_spread(walls, pl.col("wall_ns") - pl.col("covered_ns"))
    blocked = finished_spread(walls, pl.col("blocked_ns"))
    lowest = lowest_coverage(walls)
    committed = _committed(operations, spans)
    results = []
    for row in _facts(operations).iter_rows(named=True):
        group = row.pop("group")
        blocked_s = blocked[group].max_s if group in blocked else None
        committed_s = committed.get(group) if row["outcome"] != "failed" else None
        durable = row.pop("durable")
        coverage_min, coverage_rank = lowest.get(group, (None, None))
        results.append(
            OperationStats(
                operation=operation,
                **row,
                wall=wall.get(group),
                blocked_s=blocked_s,
                committed_s=committed_s,
                durable_s=committed_s if durable else None,
                coverage_min=coverage_min,
                coverage_rank=coverage_rank,
                unattributed=rest.get(group),
                io_GBps=_io_GBps(operation, phases.get(group, [])),
                blocked_GBps=throughput_GBps(row["bytes"], blocked_s),
                phases=phases.get(group, []),
                per_rank=ranks.get(group, []),
            )
        )
    return results


def _facts(operations: pl.DataFrame) -> pl.DataFrame:
    """Per group what its ranks' records say together; the fields of OperationStats by their names.

    An operation failed if it failed on one rank, and else is unfinished if it is so on one. It was durable if
    some rank says so and none denies it.
    """
    failed = pl.col("outcome") == "failed"
    finished = pl.col("end_ns").is_not_null()

    def total(name: str) -> pl.Expr:  # null, not 0, where no rank counted any
        return pl.when(pl.col(name).count() > 0).then(pl.col(name).sum()).alias(name)

    return (
        operations.group_by("group")
        .agg(
            pl.col("tag").drop_nulls().mode().sort().first(),
            pl.col("step").drop_nulls().mode().sort().first(),
            pl.col("cycle").first(),
            pl.col("engine").drop_nulls().mode().sort().first(),
            pl.when(failed.any())
            .then(pl.lit("failed"))
            .when(finished.all())
            .then(pl.lit("ok"))
            .otherwise(pl.lit("unfinished"))
            .alias("outcome"),
            pl.col("error").filter(failed).drop_nulls().first(),
            pl.len().alias("ranks"),
            finished.sum().alias("finished_ranks"),
            total("bytes"),
            total("num_files"),
            (pl.col("durable").any() & pl.col("durable").all()).fill_null(False).alias("durable"),
        )
        .sort("group")
    )


def _committed(operations: pl.DataFrame, spans: pl.DataFrame) -> dict[int, float]:
    """Seconds from the first rank's start to the end of the last committing span; by group."""
    start = operations.group_by("group").agg(pl.col("start_ns").min().alias("first_ns"))
    ends = (
        spans.filter(
            pl.col("detail").is_in(_COMMITTING) & (pl.col("phase") == "commit") & pl.col("error").is_null()
        )
        .group_by("group")
        .agg(pl.col("end_ns").max().alias("last_ns"))
    )
    table = ends.join(start, on="group").select("group", pl.col("last_ns") - pl.col("first_ns"))
    return {group: duration_ns / 1e9 for group, duration_ns in table.iter_rows()}


def _io_GBps(operation: str, phases: list[PhaseStats]) -> float | None:
    """Bytes moved to or from storage over the slowest rank's time for it: write and fsync, or read."""
    parts = {(p.name, d.name): (p, d) for p in phases for d in p.details}
    if operation == "save" and ("flush", "write") in parts:
        flush, write = parts["flush", "write"]
        return throughput_GBps(write.bytes, flush.time.max_s)
    if operation == "load" and ("load", "read") in parts:
        _, read = parts["load", "read"]
        return throughput_GBps(read.bytes, read.time.max_s)
    return None
