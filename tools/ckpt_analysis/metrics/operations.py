"""Saves and loads over all ranks: wall time, time that training was blocked, time until durable."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import polars as pl

from ..common.intervals import pieces
from ..common.parallel import map_ahead
from ..model.frame import Frames
from ..model.run_info import CycleInfo
from .critical_rank import critical_ranks
from .phases import throughput_GBps
from .rank_totals import finished_spreads, join_totals, stats_over_ranks
from .results import OperationStats, PhaseStats
from .span_times import MEASURED, SpanTimes, times_of_piece
from .volumes import Volumes, add_parts, regrouped, volumes

# The details of a commit after which the checkpoint counts; pruning old ones comes later.
COMMITTING = ("manifest", "publish")


@dataclass(frozen=True)
class RankTimes:
    """Every rank's part of all operations of one kind, in ns.

    seconds  group, rank, phase, detail ("": the phase as a whole), busy_ns
    totals   group, rank, wall_ns (null: unfinished), blocked_ns, drained_ns, covered_ns, own_ns
    volumes  of this and other operations
    """

    seconds: pl.DataFrame
    totals: pl.DataFrame
    volumes: Volumes


def rank_times(frames: Frames, measured: Sequence[tuple[int, SpanTimes]] | None = None) -> dict[str, RankTimes]:
    """Measure every rank in all saves and loads; by operation, "save" and "load".

    `measured` is what `span_times` has of all spans, in batches, each with the row in `operations` at which the batch
    begins. None: it is worked out here.
    """
    if measured is None:
        operations = frames.operations
        measured = [(0, times) for times in map_ahead(partial(times_of_piece, operations), pieces(frames.spans))]
    kind, group = frames.operations["operation"], frames.operations["group"]
    seconds, parts = (
        pl.concat([table.with_columns(pl.col("op") + pl.lit(first, pl.UInt32)) for first, table in tables])
        for tables in (
            [(first, times.seconds) for first, times in measured],
            [(first, times.totals) for first, times in measured],
        )
    )
    volume_parts = add_parts([regrouped(times.volumes, group.slice(first)) for first, times in measured])
    moved = volumes(volume_parts, volume_parts)

    def of_kind(table: pl.DataFrame, operation: str) -> pl.DataFrame:
        mine = frames.placed(table.filter((kind == operation).gather(table["op"])), "group", "rank")
        return mine.select("group", "rank", pl.exclude("op", "group", "rank"))

    times = {}
    for operation in MEASURED:
        totals = join_totals(frames.operations.filter(kind == operation), of_kind(parts, operation))
        times[operation] = RankTimes(of_kind(seconds, operation), totals, moved)
    return times


def measure(
    frames: Frames, operation: str, times: RankTimes, *, per_rank: bool, lacking: Collection[int] = ()
) -> list[OperationStats]:
    """Statistics of every `operation` ("save" or "load"), in the order in which they began.

    `times` is what `rank_times` has for it; `lacking` are the groups without a record of some rank, as
    `groups_lacking_ranks` finds them: what all ranks moved is not known there.
    """
    operations = frames.operations.filter(pl.col("operation") == operation)
    if operations.is_empty():
        return []
    critical = critical_ranks(frames, operation, times.seconds, times.totals)
    spreads = finished_spreads(times.totals, critical)
    over_ranks = stats_over_ranks(
        times.seconds, times.totals, times.volumes, critical, spreads, operation, per_rank=per_rank
    )
    drained = _drained(times.totals)
    committed = _committed(frames, operation)
    results = []
    for row in _facts(operations).iter_rows(named=True):
        group, durable = row.pop("group"), row.pop("durable")
        if group in lacking:
            row |= {"bytes": None, "num_files": None}
            durable = None if durable else durable
        blocked = spreads.get((group, "blocked_ns"))
        recorded = blocked and over_ranks[group]["phases"]  # without a span nothing says that it did not block
        blocked_s = blocked.max_s if blocked and recorded else None
        committed_s = committed.get(group) if row["outcome"] != "failed" else None
        results.append(
            OperationStats(
                **over_ranks[group],
                **row,
                operation=operation,
                blocked_s=blocked_s,
                drain_s=drained.get(group),
                committed_s=committed_s,
                durable_s=committed_s if durable else None,
                durable=durable,
                io_GBps=None if group in lacking else _io_GBps(operation, over_ranks[group]["phases"]),
                blocked_GBps=throughput_GBps(row["bytes"], blocked_s),
            )
        )
    return results


def groups_lacking_ranks(operations: pl.DataFrame, cycles: Iterable[CycleInfo], *, ours: bool) -> set[int]:
    """Groups of saves and loads that some rank has no record of, though it took part as far as can be told.

    Where records say how many ranks take part, that counts. Otherwise a rank without a trace did. In this project's
    trainer (`ours`) every rank takes part. In other jobs those do that a member of the group saves or loads with at
    another time; inferred operations and those of weights are made by any ranks.
    """
    infos = {info.cycle: info for info in cycles}
    free = (pl.col("inferred") | pl.col("weights_only")).all()
    moving = operations.filter(pl.col("operation").is_in(MEASURED)).group_by("group")
    each = moving.agg(
        pl.col("operation", "cycle").first(), pl.col("rank").unique().sort(), free.alias("free"),
        pl.col("said_ranks").max(),
    )  # fmt: skip
    # Far fewer than there are groups
    alike = each.group_by("operation", "cycle", "rank", "free", "said_ranks").agg("group").rows()
    together: dict[tuple[str, int], set[int]] = {}  # kind, rank -> those that take part with it
    for kind, _, ranks, is_free, _, _ in alike:
        for rank in () if is_free else ranks:
            together.setdefault((kind, rank), set()).update(ranks)
    lacking: set[int] = set()
    for kind, cycle, ranks, is_free, said, groups in alike:
        if said is not None:
            if len(ranks) < said:
                lacking.update(groups)
            continue
        expected = set(range(infos[cycle].expected)).difference(infos[cycle].missing)
        if is_free:
            expected = set()
        elif not ours:
            expected &= set().union(*(together[kind, rank] for rank in ranks))
        if infos[cycle].missing or not expected <= set(ranks):
            lacking.update(groups)
    return lacking


def _facts(operations: pl.DataFrame) -> pl.DataFrame:
    """What the records of all ranks of a group say; the columns are fields of OperationStats.

    An operation failed if it failed on one rank, and else is unfinished if it is so on one. It was not durable if a
    rank says so; it was if all ranks finished it and some rank says so; otherwise that is not known.
    """
    failed = pl.col("outcome") == "failed"
    finished = pl.col("end_ns").is_not_null()
    ended = pl.when(finished.all()).then(pl.lit("ok")).otherwise(pl.lit("unfinished"))
    outcome = pl.when(failed.any()).then(pl.lit("failed")).otherwise(ended)

    def total(name: str) -> pl.Expr:  # null where no rank counted any, or one has not said yet what it did
        return pl.when((pl.col(name).count() > 0) & finished.all()).then(pl.col(name).sum()).alias(name)

    return (
        operations.group_by("group")
        .agg(
            pl.col("tag").drop_nulls().mode().sort().first(),
            pl.col("weights_only").all(),
            pl.col("step").drop_nulls().mode().sort().first(),
            pl.col("cycle").first(),
            pl.col("engine").drop_nulls().mode().sort().first(),
            pl.col("tier").drop_nulls().mode().sort().first(),
            outcome.alias("outcome"),
            pl.col("error").filter(failed).drop_nulls().first(),
            pl.len().alias("ranks"),
            finished.sum().alias("finished_ranks"),
            total("bytes"),
            total("num_files"),
            pl.when(~pl.col("durable").all())
            .then(False)
            .when(finished.all() & pl.col("durable").any())
            .then(True)
            .alias("durable"),
        )
        .sort("group")
    )


def _drained(totals: pl.DataFrame) -> dict[int, float]:
    """Seconds that the end of training, or a load, waited for a save, on the rank that waited longest; by group."""
    waited = totals.filter(pl.col("drained_ns") > 0).group_by("group").agg(pl.col("drained_ns").max())
    return {group: longest / 1e9 for group, longest in waited.iter_rows()}


def _committed(frames: Frames, operation: str) -> dict[int, float]:
    """Seconds from the first rank's start to the end of the last committing span; by group."""
    of_kind = pl.col("operation") == operation
    start = frames.operations.filter(of_kind).group_by("group").agg(pl.col("start_ns").min().alias("first_ns"))
    committing = pl.col("detail").is_in(COMMITTING) & (pl.col("phase") == "commit") & pl.col("error").is_null()
    spans = frames.spans_of(what=committing).filter(of_kind)
    ends = spans.group_by("group").agg(pl.col("end_ns").max().alias("last_ns"))
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
