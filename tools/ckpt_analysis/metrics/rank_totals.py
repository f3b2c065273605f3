"""Per rank and operation: wall time, time that training was blocked, and time that phases account for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from ..common.intervals import busy, clip, pieces
from ..common.phase_kinds import AFTERWARDS, WAITING
from .phases import phase_stats, rank_stats, spread_over_ranks
from .results import Spread
from .volumes import Volumes

_RANK = ["group", "rank"]
_BUSY_COLUMNS = (
    "op", *_RANK, "phase", "start_ns", "end_ns", "duration_ns", "blocking", "operation_start_ns", "operation_end_ns",
)  # fmt: skip


def join_totals(operations: pl.DataFrame, parts: pl.DataFrame) -> pl.DataFrame:
    """Per group and rank: wall_ns (null if unfinished), blocked_ns, drained_ns, covered_ns, own_ns.

    `parts` are what `rank_busy` and `own_time` gave. blocked_ns is the union of the spans that blocked training;
    drained_ns that of the waits for this very save when training was over. covered_ns is what the spans account for
    within the operation: the blocking ones, and those in the background while training goes on.
    """
    return (
        operations.select(*_RANK, (pl.col("end_ns") - pl.col("start_ns")).alias("wall_ns"))
        .join(parts, on=_RANK, how="left")
        .with_columns(pl.col("blocked_ns", "drained_ns", "covered_ns", "own_ns").fill_null(0))
    )


def own_time(seconds: pl.DataFrame, of: Sequence[str] = _RANK) -> pl.DataFrame:
    """own_ns per operation and rank: busy time in the phases that are no waiting, of what `phase_seconds` gave.

    `of` as in `rank_busy`. A start-up's load, and a return, count without the barriers inside them.
    """
    whole = (pl.col("detail") == "") & ~pl.col("phase").is_in(WAITING) & ~pl.col("phase").is_in(AFTERWARDS)
    inner_wait = pl.col("phase").is_in(["load", "return"]) & pl.col("detail").is_in(WAITING)
    return (
        seconds.filter(whole | inner_wait)
        .with_columns(pl.when(inner_wait).then(-pl.col("busy_ns")).otherwise(pl.col("busy_ns")))
        .group_by(of)
        .agg(pl.col("busy_ns").sum().alias("own_ns"))
    )


def rank_busy(spans: pl.DataFrame, of: Sequence[str] = _RANK) -> pl.DataFrame:
    """blocked_ns, drained_ns and covered_ns per group and rank that has a span.

    `of` are the columns that say of which operation and rank a span is.
    """
    spans = spans.select(name for name in _BUSY_COLUMNS if name in spans.columns)
    return pl.concat([_piece(piece, list(of)) for piece in pieces(spans)])


def _piece(spans: pl.DataFrame, of: list[str]) -> pl.DataFrame:
    blocking, drains = blocking_spans(spans, of)
    if blocking.height == spans.height and _nothing_cut(spans):
        both = busy(spans, of).rename({"union_ns": "blocked_ns", "busy_ns": "covered_ns"})
        return both.select(*of, "covered_ns", "blocked_ns", pl.lit(0, pl.Int64).alias("drained_ns"))
    inside = clip(spans, "operation_start_ns", "operation_end_ns")
    covered = busy(inside, of).select(*of, pl.col("busy_ns").alias("covered_ns"))
    blocked = busy(blocking, of).select(*of, pl.col("union_ns").alias("blocked_ns"))
    drained = busy(drains, of).select(*of, pl.col("union_ns").alias("drained_ns"))
    return (
        covered.join(blocked, on=of, how="full", coalesce=True)
        .join(drained, on=of, how="left")
        .with_columns(pl.col("blocked_ns", "drained_ns", "covered_ns").fill_null(0))
    )


def blocking_spans(spans: pl.DataFrame, of: Sequence[str] = _RANK) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(Spans that held training up, waits for this very save when there was none left to hold up); `of` as above."""
    drains = _drains(spans, of)
    blocking = spans.filter("blocking")
    if not drains.is_empty():
        blocking = blocking.join(drains, on=[*of, "phase", "start_ns"], how="anti", maintain_order="left")
    return blocking, drains


def _nothing_cut(spans: pl.DataFrame) -> bool:
    """Whether all spans lie within their operations."""
    early = pl.col("start_ns") < pl.col("operation_start_ns")
    late = pl.col("end_ns") > pl.col("operation_end_ns")  # null for an operation without an end
    return not spans.select((early | late.fill_null(False)).any()).item()


def _drains(spans: pl.DataFrame, of: Sequence[str]) -> pl.DataFrame:
    """Waits of the end of training, or of a load, for a save: those that come after what it collected itself."""
    waits = spans.filter(pl.col("phase") == "wait_previous")
    if waits.is_empty():
        return waits
    collected = spans.filter(pl.col("phase") == "collect").group_by(of).agg(collect_ns=pl.col("start_ns").min())
    after = waits.join(collected, on=of, how="inner", maintain_order="left")
    return after.filter(pl.col("start_ns") >= pl.col("collect_ns")).drop("collect_ns")


def stats_over_ranks(
    seconds: pl.DataFrame,
    totals: pl.DataFrame,
    moved: Volumes,
    critical: pl.DataFrame,
    spreads: dict[tuple[int, str], Spread],
    operation: str,
    *,
    per_rank: bool,
) -> dict[int, dict[str, Any]]:
    """group -> the fields of `Stats` that are computed over ranks, of every operation in `totals`.

    `seconds` is what `phase_seconds` gives, `totals` what `join_totals` does, `moved` what `volumes` does, `critical`
    what `critical_ranks` does, `spreads` what `finished_spreads` does.
    """
    members = totals.select(_RANK).join(critical, on="group", how="left")
    phases = phase_stats(seconds, moved, members, operation)
    ranks = rank_stats(seconds, totals) if per_rank else {}
    lowest = lowest_coverage(totals)
    waited_for = {group: (rank, phase) for group, rank, phase in critical.iter_rows()}
    return {
        group: {
            "group": group,
            "wall": spreads.get((group, "wall_ns")),
            "critical_rank": waited_for.get(group, (None, None))[0],
            "critical_phase": waited_for.get(group, (None, None))[1],
            "coverage_min": lowest.get(group, (None, None))[0],
            "coverage_rank": lowest.get(group, (None, None))[1],
            "unattributed": spreads.get((group, "rest_ns")),
            "phases": phases.get(group, []),
            "per_rank": ranks.get(group, []),
        }
        for group in totals["group"].unique()
    }


def finished_spreads(totals: pl.DataFrame, critical: pl.DataFrame) -> dict[tuple[int, str], Spread]:
    """Spreads over the finished ranks of each group; by (group, name).

    The names are those of times in `totals`: wall_ns, blocked_ns, and rest_ns for what no span accounts for. `critical`
    is what `critical_ranks` gives; a critical rank that did not finish has no value.
    """
    finished = totals.filter(pl.col("wall_ns").is_not_null())
    rest_ns = (pl.col("wall_ns") - pl.col("covered_ns")).alias("rest_ns")
    times = finished.select(*_RANK, "wall_ns", "blocked_ns", rest_ns)
    table = times.unpivot(index=_RANK, variable_name="name", value_name="busy_ns")
    known = critical.join(finished, left_on=["group", "critical"], right_on=_RANK, how="semi")
    members = finished.select(_RANK).join(known, on="group", how="left")
    spreads = spread_over_ranks(table, members, ["group", "name"])
    return {(group, name): spread for (group, name), (spread, _) in spreads.items()}


def lowest_coverage(totals: pl.DataFrame) -> dict[int, tuple[float, int]]:
    """(coverage, rank) of the rank with the lowest coverage among the finished ranks of each group."""
    ratio = pl.col("covered_ns") / pl.col("wall_ns")
    share = pl.when(pl.col("wall_ns") > 0).then(ratio).otherwise(1.0).alias("share")
    lowest = (
        totals.filter(pl.col("wall_ns").is_not_null())
        .with_columns(share)
        .filter(pl.col("share") == pl.col("share").min().over("group"))
        .group_by("group")
        .agg(pl.col("share", "rank").sort_by("rank").first())
    )
    return {group: (share, rank) for group, share, rank in lowest.iter_rows()}
