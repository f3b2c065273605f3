"""Rules on ranks and hosts that are slower than the others, and on ranks that others wait for in a barrier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl

from ...common.formatting import plural, seconds
from ..metrics.results import OperationStats
from .comparisons import against_median, explain_delay, slow_hosts, slow_ranks
from .evidence import Evidence, median_of, name_of, phase_of
from .rule import Advice, Observation, Thresholds

_NAMED = 5  # of more stragglers in one kind of operation the worst are named
_EXPLAINED = 0.75  # of the excess in time: if a rank moved so much more bytes, these explain it
_UNEVEN = Advice(
    "Spread what it writes over more ranks: another layout, or --checkpoint-engine lazy",
    "It is not slow, it has more to do: look at Files for what it writes, and spread it over more ranks "
    "(another TP x PP x DP split, or an engine with one file per rank such as --checkpoint-engine lazy).",
)
_UNEVEN_FOR_HOOKS = Advice(
    "Spread what it writes over more ranks",
    "It is not slow, it has more to do: look at Files for what it writes, and spread it over more ranks.",
)
_MORE_TO_DO = 1.1  # times the bytes, where ranks are too few for a median: work that differs so is not compared
_MAYBE_UNEVEN = Advice(
    "See in Files what it writes beyond the others', and spread that over more ranks",
    "It has more to do, and so few ranks do not tell whether it is slow as well: look at Files for what it writes "
    "beyond the others', and spread that over more ranks.",
)
_PIPELINE = (
    ' Data-parallel rank 0 writes the layers of a pipeline alone, unless DeepSpeed\'s "checkpoint" section has '
    '{"parallel_write": {"pipeline_stage": true}}.'
)
_SPEED_UP = "Speed up the rank that is waited for"
_LATE = Advice(_SPEED_UP, f"{_SPEED_UP} (see Barriers).")
_LATE_LOAD = Advice(_SPEED_UP, f"{_SPEED_UP} (see Barriers and Ranks): no engine loads in the background.")


def straggling_ranks(e: Evidence, limits: Thresholds) -> list[Observation]:
    """Ranks that work much longer than the median rank, except on hosts whose ranks are all slow."""
    slow = slow_ranks(e.tables.totals, limits)
    if slow.is_empty():
        return []
    hosts = rank_hosts(e)
    slow = slow.join(hosts, on=["group", "rank"], how="left")
    slow = slow.join(slow_hosts(e.tables.totals, hosts), on=["group", "host"], how="anti")
    slow = _not_oversubscribed(e, slow)
    found = []
    for rows in _worst(slow, "rank"):
        row = rows.row(0, named=True)
        rank, operation = row["rank"], row["operation"]
        most = against_median(e.tables, row["group"], [rank])
        moved = _times_the_bytes(e, row["group"], rank)
        other = _compared(e, row["group"])
        text = (
            f"{_operation(e, row['group'])}: {seconds(row['own_ns'] / 1e9)} s of its own against "
            f"{seconds(row['median_ns'] / 1e9)} s of {other}"
        )
        text += _most_of_it(most)
        text += f"; it moved {moved:.1f} times {other}'s bytes" if moved else ""
        ours, for_hooks = _uneven(e, row, moved, limits) or (None, None)
        found.append(
            Observation(
                title=f"Rank {rank} on {row['host']} is slower than the others in " + _how_often(e, rows, operation),
                evidence=text,
                cost_s=row["excess_ns"] / 1e9,
                data={"operation": operation, "rank": rank, "host": row["host"], "phase": most and most[0]}
                | {"own_s": row["own_ns"] / 1e9, "median_s": row["median_ns"] / 1e9, "times": rows.height},
                advice=ours,
                advice_for_hooks=for_hooks,
            )
        )
    return found


def _uneven(e: Evidence, row: dict[str, Any], moved: float | None, limits: Thresholds) -> tuple[Advice, Advice] | None:
    """The advice, and that for hooks, on a rank that moved `moved` times the bytes; None if they explain nothing."""
    ranks = e.tables.totals.filter(pl.col("group") == row["group"]).height
    if moved is not None and moved * row["median_ns"] >= _EXPLAINED * row["own_ns"]:  # the median may have none
        return _UNEVEN, _in_pipelines(e, _UNEVEN_FOR_HOOKS)
    if moved is not None and moved >= _MORE_TO_DO and ranks < limits["least_ranks"]:
        return _MAYBE_UNEVEN, _in_pipelines(e, _MAYBE_UNEVEN)
    return None


def _in_pipelines(e: Evidence, advice: Advice) -> Advice:
    """The advice, with what helps where a pipeline has stages if this run has."""
    return replace(advice, text=advice.text + _PIPELINE) if e.is_pipeline else advice


def _compared(e: Evidence, group: int) -> str:
    """With which rank of a group one is compared."""
    return f"the {'other' if e.tables.totals.filter(pl.col('group') == group).height == 2 else 'median'} rank"


def _most_of_it(found: tuple[str, float, float] | None) -> str:
    """In which phase, as `against_median` found it; nothing is said where no phase was recorded."""
    return "" if found is None else f"; most of it in {found[0]} ({seconds(found[1])} s against {seconds(found[2])} s)"


def straggling_hosts(e: Evidence, limits: Thresholds) -> list[Observation]:
    """Hosts whose ranks work longer than the ranks of other hosts."""
    if e.hosts["host"].n_unique() < 2:
        return []
    hosts = rank_hosts(e)
    found = []
    for rows in _worst(_not_oversubscribed(e, slow_hosts(e.tables.totals, hosts, limits)), "host"):
        row = rows.row(0, named=True)
        group, host, operation = row["group"], row["host"], row["operation"]
        ranks = hosts.filter((pl.col("group") == group) & (pl.col("host") == host))["rank"].to_list()
        most = against_median(e.tables, group, ranks)
        found.append(
            Observation(
                title=f"Host {host} ({plural(len(ranks), 'rank')}) is slower than the others in "
                + _how_often(e, rows, operation),
                evidence=f"{_operation(e, group)}: its median rank works {seconds(row['own_ns'] / 1e9)} s, those "
                f"of the other hosts {seconds(row['median_ns'] / 1e9)} s{_most_of_it(most)}",
                cost_s=row["excess_ns"] / 1e9,
                data={"operation": operation, "host": host, "ranks": ranks, "phase": most and most[0]}
                | {"own_s": row["own_ns"] / 1e9, "median_s": row["median_ns"] / 1e9, "times": rows.height},
            )
        )
    return found


def barrier_skew(e: Evidence, limits: Thresholds) -> list[Observation]:
    """Saves and loads in which most ranks spend much of their time waiting for others while training is blocked."""
    worst: dict[str, tuple[float, OperationStats]] = {}
    for kind, stats in e.operations:
        barrier = phase_of(stats, "barrier")
        if not isinstance(stats, OperationStats) or stats.wall is None or barrier is None or not median_of(stats.wall):
            continue
        waited = median_of(barrier.time)
        if barrier.blocking == "none" or waited < limits["least_s"]:
            continue
        if waited >= limits["share"] * median_of(stats.wall) and waited > worst.get(kind, (0.0, stats))[0]:
            worst[kind] = (waited, stats)
    return [_skew(e, kind, stats, waited) for kind, (waited, stats) in worst.items()]


def _skew(e: Evidence, kind: str, stats: OperationStats, waited: float) -> Observation:
    assert stats.wall is not None
    last = _waited_for(e, stats.group)
    why = explain_delay(e.tables, e.frames.operations, stats.group, last, waited)
    return Observation(
        title=f"Half of all ranks wait {100 * waited / median_of(stats.wall):.0f} % of a {kind} or more for others",
        evidence=f"{name_of(kind, stats)}: the median rank waits {seconds(waited)} s of "
        f"{seconds(stats.wall.median_s)} s; rank {last} waits least, so it was waited for: {why}",
        cost_s=waited,
        data={"operation": kind, "cycle": stats.cycle, "median_wait_s": waited, "waited_for": last},
        advice=_LATE_LOAD if kind == "load" else None,
        advice_for_hooks=_LATE_LOAD if kind == "load" else _in_pipelines(e, _LATE),
    )


def rank_hosts(e: Evidence) -> pl.DataFrame:
    """group, rank, host of every operation."""
    return (
        e.frames.operations.select("group", "cycle", "rank")
        .join(e.hosts, on=["cycle", "rank"])
        .select("group", "rank", "host")
    )


def _not_oversubscribed(e: Evidence, slow: pl.DataFrame) -> pl.DataFrame:
    """The slow ranks on hosts with a core for each rank: on other hosts it is chance which rank is slower."""
    cycles = e.frames.operations.select("group", "cycle").unique()
    return slow.join(cycles, on="group").join(e.oversubscribed, on=["cycle", "host"], how="anti").drop("cycle")


def _worst(slow: pl.DataFrame, unit: str) -> list[pl.DataFrame]:
    """Rows of each (operation, `unit`), the worst operation first; of each operation those with the largest excess."""
    ordered = slow.sort("excess_ns", "group", unit, descending=[True, False, False])
    parts = ordered.partition_by("operation", unit, maintain_order=True)
    taken: dict[str, list[pl.DataFrame]] = {}
    for part in parts:
        taken.setdefault(part["operation"][0], []).append(part)
    return [part for those in taken.values() for part in those[:_NAMED]]


def _operation(e: Evidence, group: int) -> str:
    for kind, stats in e.operations:
        if stats.group == group:
            return name_of(kind, stats)
    row = e.frames.operations.filter(pl.col("group") == group).row(0, named=True)
    return f"{row['operation']} of cycle {row['cycle']}"


def _how_often(e: Evidence, rows: pl.DataFrame, operation: str) -> str:
    total = e.tables.totals.filter(pl.col("operation") == operation)["group"].n_unique()
    return f"{rows['group'].n_unique()} of {plural(total, operation)}"


def _times_the_bytes(e: Evidence, group: int, rank: int) -> float | None:
    """Ratio of the bytes that the rank moved to those of the median rank; None if unknown."""
    rows = e.frames.operations.filter(pl.col("group") == group).select("rank", "bytes")
    mine: Any = rows.filter(pl.col("rank") == rank)["bytes"][0]
    median: Any = rows["bytes"].quantile(0.5, interpolation="lower")
    return mine / median if mine and median else None


def _waited_for(e: Evidence, group: int) -> int:
    """The rank that waited least in barriers; the lowest of equals."""
    ranks = e.tables.with_phase(pl.col("group") == group, "barrier")
    return ranks.with_columns(pl.col("busy_ns").fill_null(0)).sort("busy_ns", "rank")["rank"][0]
