"""Figure 7: time spent in barriers, and the ranks that were waited for."""

from __future__ import annotations

from typing import Any, NamedTuple

import polars as pl

from ....common.formatting import plural
from ....common.tables import Column, numbers, times
from ...findings.comparisons import explain_delay
from ...metrics.results import OperationStats
from .content import Content, Plot, Table, missing, plot, table
from .plots import FILLED, LINE, MARK, THIRD_LINE, layout, line
from .run_data import RunData, spread_over_saves, title_of

_MOST_RANKS = 2048
_NAMED = 4
_NO_SKEW_S = 0.001  # of skew: below, nobody came late
_SHADES = ("#666666", "#999933", "#4477AA", "#AA4499", "#44AA99", "#DDCC77")


def draw(run: RunData) -> Content:
    """Barriers of the shown save and load, one by one, and the waiting of every save."""
    plots: list[Plot] = []
    tables: list[Table] = []
    notes: list[str] = []
    for stats in (run.save, run.load):
        if stats is None or not run.has_ranks(stats):
            continue
        waits = _waits(run, stats)
        if waits.is_empty():
            notes.append(f"{title_of(stats)} has no barrier.")
            continue
        plots.append(_ranks(stats, waits))
        tables.append(_table(run, stats, waits))
        notes.append(_sentence(run, stats, waits))
    if not plots:
        return missing("No save or load recorded a barrier, so no rank is known to have waited for another.")
    over_saves = _over_saves(run)
    return Content([*plots, *([over_saves] if over_saves else [])], tables, notes)


def _waits(run: RunData, stats: OperationStats) -> pl.DataFrame:
    """nth, rank, wait_s, start_ns, end_ns: the n-th barrier span of each rank, from 1."""
    spans = run.save_spans if stats is run.save else run.frames.spans.filter(pl.col("group") == stats.group)
    return (
        spans.filter(pl.col("phase") == "barrier")
        .sort("rank", "start_ns")
        .select(
            (pl.int_range(pl.len()).over("rank") + 1).alias("nth"),
            "rank",
            (pl.col("duration_ns") / 1e9).alias("wait_s"),
            "start_ns",
            "end_ns",
        )
    )


def _ranks(stats: OperationStats, waits: pl.DataFrame) -> Plot:
    """Waiting time of each rank, a colour per barrier; of very many ranks the one that waits longest of neighbours."""
    per_bar = -(-stats.ranks // _MOST_RANKS)
    data: list[dict[str, Any]] = []
    for nth in sorted(waits["nth"].unique()):
        mine = waits.filter(pl.col("nth") == nth)
        bars = (
            mine.group_by((pl.col("rank") // per_bar * per_bar).alias("from"))
            .agg(pl.col("wait_s").max())
            .sort("from")
        )
        data.append(
            {
                "type": "bar",
                "name": f"barrier {nth}",
                "x": bars["from"].to_list(),
                "y": [round(value, 6) for value in bars["wait_s"]],
                "marker": {"color": _SHADES[(nth - 1) % len(_SHADES)]},
                "hovertemplate": f"rank %{{x}}, barrier {nth}: %{{y:.4f}} s<extra></extra>",
            }
        )
    few = f" (the longest wait of every {per_bar} neighbours)" if per_bar > 1 else ""
    arranged = layout(310, x=f"rank{few}", y="seconds waited", barmode="stack")
    description = f"Bars of the time that each rank of {title_of(stats)} waited in barriers{few}."
    return plot(f"{title_of(stats)}: who waited", data, arranged, description)


def _last_to_come(
    run: RunData, stats: OperationStats, waits: pl.DataFrame, nth: int
) -> tuple[list[int], float]:
    """(ranks that were waited for, skew in s) of the n-th barrier.

    The rank that waits least came last, since all leave together. Ranks that have no n-th barrier span while the
    others wait did something else meanwhile: the others waited for these.
    """
    mine = waits.filter(pl.col("nth") == nth)
    everyone = set(run.tables.totals.filter(pl.col("group") == stats.group)["rank"])
    absent = sorted(everyone - set(mine["rank"]))
    shortest: Any = mine["wait_s"].min()
    longest: Any = mine["wait_s"].max()
    if absent:
        return absent, longest
    return [mine.filter(pl.col("wait_s") == shortest)["rank"].sort()[0]], longest - shortest


def _sentence(run: RunData, stats: OperationStats, waits: pl.DataFrame) -> str:
    """The costliest barrier, the ranks that the others waited for there, and why one came late."""
    costly = waits.group_by("nth").agg(pl.col("wait_s").sum()).sort("wait_s", "nth", descending=[True, False])
    nth, total = costly.row(0)
    ranks, skew = _last_to_come(run, stats, waits, nth)
    cost = f"{title_of(stats)}: barrier {nth} cost {total:.3f} rank-seconds"
    if skew < _NO_SKEW_S:
        return f"{cost}; all ranks came to it together."
    waited = f"{cost}; the others waited for {_ranks_text(ranks)}"
    if len(ranks) > 1:
        return f"{waited}."
    why = explain_delay(run.tables, run.frames.operations, stats.group, ranks[0], skew)
    return f"{waited} by up to {skew:.3f} s: {why}."


def _ranks_text(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED]))}{more}"


class _Barrier(NamedTuple):
    nth: int
    waits: pl.Series  # in s
    awaited: list[int]  # ranks
    skew_s: float
    hosts: set[str]  # of the awaited ranks


_COLUMNS: tuple[Column[_Barrier], ...] = (
    numbers("barrier", lambda one: one.nth),
    numbers("ranks that waited", lambda one: len(one.waits)),
    Column("waited for", lambda one: _ranks_text(one.awaited)),
    Column("on host", lambda one: ", ".join(sorted(one.hosts))),
    times("skew s", lambda one: one.skew_s),
    times("longest wait s", lambda one: float(str(one.waits.max()))),
    times("median wait s", lambda one: float(str(one.waits.median()))),
    times("rank-seconds", lambda one: float(one.waits.sum())),
)


def _table(run: RunData, stats: OperationStats, waits: pl.DataFrame) -> Table:
    barriers = []
    for nth in sorted(waits["nth"].unique()):
        ranks, skew_s = _last_to_come(run, stats, waits, nth)
        hosts = {run.host_of(stats.cycle, rank) for rank in ranks[:_NAMED]}
        mine = waits.filter(pl.col("nth") == nth)["wait_s"]
        barriers.append(_Barrier(nth, mine, ranks, skew_s, hosts))
    return table(f"{title_of(stats)}: {plural(len(barriers), 'barrier')}", _COLUMNS, barriers)


def _over_saves(run: RunData) -> Plot | None:
    """Share of each save that ranks spend in barriers; None for a single save."""
    saves = [save for save in run.report.saves if save.wall]
    if len(saves) < 2:
        return None
    share = 100 * pl.col("busy_ns").fill_null(0) / pl.col("wall_ns")
    waited = run.tables.with_phase("barrier").filter(
        (pl.col("operation") == "save") & (pl.col("wall_ns") > 0)
    )
    low, median, high = spread_over_saves(waited, share, saves)
    x = list(range(1, len(saves) + 1))
    text = [f"{save.tag}, cycle {save.cycle}" for save in saves]
    look = {"text": text, "hovertemplate": "%{text}: %{y:.1f} %<extra>%{fullData.name}</extra>"}
    data = [
        line("rank that waits most", MARK, x=x, y=high, **look),
        line("rank that waits least", THIRD_LINE, x=x, y=low, **FILLED, **look),
        line("median rank", LINE, x=x, y=median, **look),
    ]
    arranged = layout(
        300,
        x="saves, in order",
        y="% of the save",
        xaxis={"tickmode": "linear", "tick0": 1, "dtick": -(-len(saves) // 12)},
        yaxis={"range": [0, 100]},
    )
    description = f"Lines of the share of {len(saves)} saves that ranks spent in barriers."
    return plot("Waiting over the saves", data, arranged, description)
