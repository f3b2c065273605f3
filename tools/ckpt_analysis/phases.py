"""Phases of operations over the ranks: how long, on which rank, how many bytes and files."""

from __future__ import annotations

from typing import Any

import polars as pl

from megatron.restart_trace.schema import PHASES
from tools.ckpt_analysis.frame import NAME
from tools.ckpt_analysis.intervals import busy
from tools.ckpt_analysis.results import PhaseStats, RankStats, Spread

_KEY = ["group", "phase", "detail"]
# A start-up contains the load, so it shows a phase "load" whose details are the phases of a load.
_START_ORDER = [*PHASES["startup"]]
_START_ORDER.insert(_START_ORDER.index("first_step"), "load")


def phase_seconds(phase_spans: pl.DataFrame, detail_spans: pl.DataFrame) -> pl.DataFrame:
    """Time per (group, rank, phase, detail) in `busy_ns`; detail is "" for the phase as a whole."""
    whole = busy(phase_spans, ["group", "rank", "phase"]).with_columns(pl.lit("", NAME).alias("detail"))
    parts = busy(detail_spans, ["group", "rank", "phase", "detail"])
    columns = ["group", "rank", "phase", "detail", "busy_ns"]
    return pl.concat([whole.select(columns), parts.select(columns)])


def spread_over_ranks(
    values: pl.DataFrame, members: pl.DataFrame, key: list[str]
) -> dict[tuple[Any, ...], Spread]:
    """Spread of `busy_ns` per `key` (whose first column is "group") over all ranks of the group.

    `members` holds group, rank and critical (the rank of the group to quote separately, or null). A rank
    without a value spent no time: it counts as 0.
    """
    asked = values.select(key).unique()
    full = asked.join(members, on="group").join(values, on=[*key, "rank"], how="left")
    full = full.with_columns(pl.col("busy_ns").fill_null(0))
    slowest = pl.col("busy_ns") == pl.col("busy_ns").max()
    table = full.group_by(key).agg(
        pl.col("busy_ns").max().alias("max"),
        pl.col("busy_ns").median().alias("median"),
        pl.col("busy_ns").min().alias("min"),
        pl.col("rank").filter(slowest).min().alias("slowest"),
        pl.col("busy_ns").filter(pl.col("rank") == pl.col("critical")).first().alias("at_critical"),
    )
    spreads: dict[tuple[Any, ...], Spread] = {}
    for row in table.iter_rows(named=True):
        at_critical = row["at_critical"]
        spreads[tuple(row[name] for name in key)] = Spread(
            max_s=row["max"] / 1e9,
            median_s=row["median"] / 1e9,
            min_s=row["min"] / 1e9,
            slowest_rank=row["slowest"],
            at_critical_s=None if at_critical is None else at_critical / 1e9,
        )
    return spreads


def phase_stats(
    phase_spans: pl.DataFrame, detail_spans: pl.DataFrame, members: pl.DataFrame, order: str
) -> dict[int, list[PhaseStats]]:
    """Statistics of every phase of every group, in the order of the operation `order` in PHASES.

    `phase_spans` are summed per phase; `detail_spans` (those that name a detail) per phase and detail.
    """
    seconds = phase_seconds(phase_spans, detail_spans)
    spreads = spread_over_ranks(seconds, members, _KEY)
    present = {
        tuple(row[:3]): row[3] for row in seconds.group_by(_KEY).agg(pl.col("rank").n_unique()).iter_rows()
    }
    volumes = _phase_volumes(phase_spans) | _volumes(detail_spans)
    stats: dict[int, dict[str, PhaseStats]] = {}
    for key in sorted(spreads, key=lambda k: (k[0], *_place(order, k[1], k[2]))):
        group, phase, detail = key
        num_bytes, num_files, blocking = volumes[key]
        spread = spreads[key]
        entry = PhaseStats(
            name=detail or phase,
            time=spread,
            ranks=present[key],
            bytes=num_bytes,
            num_files=num_files,
            GBps=throughput_GBps(num_bytes, spread.max_s),
            blocking=blocking,
        )
        if detail:
            stats[group][phase].details.append(entry)
        else:
            stats.setdefault(group, {})[phase] = entry
    return {group: list(phases.values()) for group, phases in stats.items()}


def rank_stats(
    phase_spans: pl.DataFrame, detail_spans: pl.DataFrame, walls: pl.DataFrame
) -> dict[int, list[RankStats]]:
    """Each rank's own numbers; `walls` holds group, rank, wall_ns, blocked_ns and covered_ns."""
    seconds = phase_seconds(phase_spans, detail_spans).sort("group", "rank", "phase", "detail")
    phases: dict[tuple[int, int], dict[str, float]] = {}
    for group, rank, phase, detail, busy_ns in seconds.iter_rows():
        phases.setdefault((group, rank), {})[f"{phase}/{detail}" if detail else phase] = busy_ns / 1e9
    result: dict[int, list[RankStats]] = {}
    for row in walls.sort("group", "rank").iter_rows(named=True):
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


def _phase_volumes(spans: pl.DataFrame) -> dict[tuple[Any, ...], tuple[int | None, int | None, str]]:
    """Volumes of whole phases: the bytes of the largest detail, since the same ones pass through several."""
    whole = _volumes(spans.with_columns(pl.lit("", NAME).alias("detail")))
    by_detail = spans.group_by("group", "phase", "detail").agg(pl.col("bytes").sum())
    largest = by_detail.group_by("group", "phase").agg(pl.col("bytes").max())
    most = {(group, phase, ""): num_bytes for group, phase, num_bytes in largest.iter_rows()}
    return {key: (None if old is None else most[key], files, b) for key, (old, files, b) in whole.items()}


def _volumes(spans: pl.DataFrame) -> dict[tuple[Any, ...], tuple[int | None, int | None, str]]:
    """(bytes, files, blocking) per (group, phase, detail); bytes is None where no span counted any."""
    table = spans.group_by(_KEY).agg(
        pl.col("bytes").sum(),
        pl.col("bytes").count().alias("counted"),
        pl.struct("rank", "file").filter(pl.col("file").is_not_null()).n_unique().alias("files"),
        pl.col("blocking").all().alias("all"),
        pl.col("blocking").any().alias("any"),
    )
    volumes = {}
    for row in table.iter_rows(named=True):
        blocking = "all" if row["all"] else "some" if row["any"] else "none"
        num_bytes = row["bytes"] if row["counted"] else None
        volumes[tuple(row[name] for name in _KEY)] = (num_bytes, row["files"] or None, blocking)
    return volumes


def _place(operation: str, phase: str, detail: str) -> tuple[int, int, int]:
    """Sort key: phases in their order, each whole phase before its details."""
    if operation == "startup":
        details = list(PHASES["load"]) if phase == "load" else []
        order = _START_ORDER
    else:
        details = list(PHASES[operation][phase])
        order = list(PHASES[operation])
    return order.index(phase), int(bool(detail)), details.index(detail) if detail else 0
