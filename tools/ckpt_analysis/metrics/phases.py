"""Phases of operations over the ranks: times, slowest rank, bytes, files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from restart_trace.schema import PHASES

from ..common.intervals import busy
from ..common.names import NAME
from .results import PhaseStats, RankStats, Spread
from .volumes import Volumes

_KEY = ["group", "phase", "detail"]
_DETAIL = pl.col("detail").cast(pl.String)
# "phase", or "phase/detail" where the detail is neither null nor "".
PHASE_NAME = pl.concat_str(
    pl.col("phase").cast(pl.String), pl.when(_DETAIL != "").then(_DETAIL), separator="/", ignore_nulls=True
).alias("phase")
# A start-up contains the load, so it shows a phase "load" whose details are the phases of a load.
START_ORDER = [*PHASES["startup"]]
START_ORDER.insert(START_ORDER.index("first_step"), "load")


def phase_seconds(
    phase_spans: pl.DataFrame, detail_spans: pl.DataFrame, of: Sequence[str] = ("group", "rank")
) -> pl.DataFrame:
    """Time per (group, rank, phase, detail) in `busy_ns`; detail is "" for the phase as a whole.

    `of` are the columns that say of which operation and rank a span is.
    """
    whole = busy(phase_spans, [*of, "phase"]).with_columns(pl.lit("", NAME).alias("detail"))
    parts = busy(detail_spans, [*of, "phase", "detail"])
    columns = [*of, "phase", "detail", "busy_ns"]
    return pl.concat([whole.select(columns), parts.select(columns)])


def spread_over_ranks(
    values: pl.DataFrame, members: pl.DataFrame, key: list[str]
) -> dict[tuple[Any, ...], tuple[Spread, int]]:
    """Spread of `busy_ns` per `key` (whose first column is "group") over all ranks of the group, ranks with a value.

    `members` holds group, rank and critical (the rank of the group to quote separately, or null). A rank
    without a value spent no time: it counts as 0.
    """
    groups = members.group_by("group").agg(
        pl.len().cast(pl.Int64).alias("members"), pl.col("rank").min().alias("lowest"), pl.col("critical").first()
    )
    slowest = pl.col("busy_ns") == pl.col("busy_ns").max()
    table = values.group_by(key).agg(
        pl.col("busy_ns").max().alias("max"),
        pl.col("busy_ns").sort().alias("sorted"),
        pl.col("rank").filter(slowest).min().alias("slowest"),
    )
    table = table.join(groups, on="group").with_columns(
        (pl.col("members") - pl.col("sorted").list.len()).alias("absent")
    )
    low, high = _value((pl.col("members") - 1) // 2), _value(pl.col("members") // 2)
    table = table.select(
        *key,
        pl.col("members", "absent", "critical", "max"),
        ((low + high) / 2).alias("median"),
        _value(pl.lit(0)).alias("min"),
        pl.when(pl.col("max") == 0).then("lowest").otherwise("slowest").alias("slowest"),
    )
    at_critical = _at_critical(values, groups, key)
    spreads: dict[tuple[Any, ...], tuple[Spread, int]] = {}
    for row in table.iter_rows(named=True):
        place = tuple(row[name] for name in key)
        quoted = None if row["critical"] is None else at_critical.get(place, 0)
        spread = Spread(
            max_s=row["max"] / 1e9,
            median_s=row["median"] / 1e9,
            min_s=row["min"] / 1e9,
            slowest_rank=row["slowest"],
            at_critical_s=None if quoted is None else quoted / 1e9,
        )
        spreads[place] = (spread, row["members"] - row["absent"])
    return spreads


def _value(place: pl.Expr) -> pl.Expr:
    """The value at `place` of all members' sorted values: first the 0 of each that is absent."""
    index = place - pl.col("absent")
    found = pl.col("sorted").list.get(index.clip(lower_bound=0), null_on_oob=True)
    return pl.when(index < 0).then(0).otherwise(found)


def _at_critical(values: pl.DataFrame, groups: pl.DataFrame, key: list[str]) -> dict[tuple[Any, ...], int]:
    """The value of each key on the critical rank of its group, where it has one."""
    critical = groups.filter(pl.col("critical").is_not_null())
    of_any = values.filter(pl.col("rank").is_in(critical["critical"].unique().to_list()))  # far fewer to join
    rows = of_any.join(critical, left_on=["group", "rank"], right_on=["group", "critical"], how="semi")
    return {row[:-1]: row[-1] for row in rows[[*key, "busy_ns"]].iter_rows()}


def phase_stats(
    seconds: pl.DataFrame, moved: Volumes, members: pl.DataFrame, order: str
) -> dict[int, list[PhaseStats]]:
    """Statistics of every phase of every group, in the order of the operation `order` in PHASES.

    `seconds` is what `phase_seconds` gives, `moved` what `volumes` does.
    """
    spreads = spread_over_ranks(seconds, members, _KEY)
    stats: dict[int, dict[str, PhaseStats]] = {}
    for group, phase, detail in sorted(spreads, key=lambda key: (key[0], *_place(order, *key[1:]))):
        volume, (spread, present) = moved[group, phase, detail], spreads[group, phase, detail]
        entry = PhaseStats(
            name=detail or phase,
            time=spread,
            ranks=present,
            bytes=volume.bytes,
            num_files=volume.num_files,
            GBps=throughput_GBps(volume.bytes, spread.max_s),
            blocking=volume.blocking,
        )
        if detail:
            stats[group][phase].details.append(entry)
        else:
            stats.setdefault(group, {})[phase] = entry
    return {group: list(phases.values()) for group, phases in stats.items()}


def rank_stats(seconds: pl.DataFrame, totals: pl.DataFrame) -> dict[int, list[RankStats]]:
    """Each rank's own numbers; `totals` holds group, rank, wall_ns, blocked_ns and covered_ns."""
    seconds = seconds.sort("group", "rank", "phase", "detail")
    phases: dict[tuple[int, int], dict[str, float]] = {}
    for group, rank, phase, detail, busy_ns in seconds.iter_rows():
        phases.setdefault((group, rank), {})[f"{phase}/{detail}" if detail else phase] = busy_ns / 1e9
    result: dict[int, list[RankStats]] = {}
    for row in totals.sort("group", "rank").iter_rows(named=True):
        wall, covered = row["wall_ns"], row["covered_ns"]
        result.setdefault(row["group"], []).append(
            RankStats(
                rank=row["rank"],
                wall_s=None if wall is None else wall / 1e9,
                blocked_s=row["blocked_ns"] / 1e9,
                coverage=None if wall is None else coverage(covered, wall),
                unattributed_s=None if wall is None else (wall - covered) / 1e9,
                phases=phases.get((row["group"], row["rank"]), {}),
            )
        )
    return result


def coverage(covered_ns: int, wall_ns: int) -> float:
    """Share of an operation's wall time that its phases account for; 1 for an operation of no length."""
    return covered_ns / wall_ns if wall_ns > 0 else 1.0


def throughput_GBps(num_bytes: int | None, seconds: float | None) -> float | None:
    """GB (1e9 bytes) per second; None if nothing was moved or no time was measured."""
    return num_bytes / 1e9 / seconds if num_bytes and seconds else None


def _place(operation: str, phase: str, detail: str) -> tuple[int, int, int]:
    """Sort key: phases in their order, each whole phase before its details."""
    if operation == "startup":
        details = list(PHASES["load"] if phase == "load" else PHASES["startup"][phase])
        order = START_ORDER
    else:
        details = list(PHASES[operation][phase])
        order = list(PHASES[operation])
    return order.index(phase), int(bool(detail)), details.index(detail) if detail else 0
