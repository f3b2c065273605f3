"""Figure 7: time spent in barriers, and the ranks that were waited for."""

from __future__ import annotations

from math import fsum
from statistics import median
from typing import NamedTuple

import polars as pl

from ....common.formatting import plural
from ....common.tables import Column, numbers, times
from ...findings.comparisons import explain_delay
from ...metrics.results import OperationStats
from ..content import Content, Plot, missing, plot, table
from .colours import BARRIERS, MARK, NEUTRAL
from .plots import FILLED, LINE, THIRD_LINE, columns, layout, line
from .run_data import RunData, spread_over_saves, title_of

_MOST_RANKS = 2048
_NAMED = 4
_NO_SKEW_S = 0.001  # of skew: below, nobody came late


def draw(run: RunData) -> Content:
    """Barriers of the shown save and load, one by one, and the waiting of every save."""
    content = Content()
    for stats in (run.save, run.load):
        if stats is None or not run.has_ranks(stats):
            continue
        waits = _waits(run, stats)
        if waits.is_empty():
            content.notes.append(f"{title_of(stats)} has no barrier.")
            continue
        barriers = [_barrier(run, stats, nth, mine) for (nth, *_), mine in waits.group_by("nth", maintain_order=True)]
        one_by_one = table(f"{title_of(stats)}: {plural(len(barriers), 'barrier')}", _COLUMNS, barriers)
        part = Content([_ranks(stats, waits)], [one_by_one])
        content.add(part, _sentence(run, stats, barriers), folded=run.is_small(_waited_s(run, stats)))
    if not content.all_plots:
        return missing("No save or load recorded a barrier, so no rank is known to have waited for another.")
    if content.plots:
        content.plots.extend(_over_saves(run))
    return content


def _waited_s(run: RunData, stats: OperationStats) -> float:
    """How long ranks waited in all saves, or all loads: in each the rank that waited longest."""
    alike = run.report.saves if stats.kind == "save" else run.report.loads
    return sum(phase.time.max_s for one in alike for phase in one.phases if phase.name == "barrier")


def _waits(run: RunData, stats: OperationStats) -> pl.DataFrame:
    """nth, rank, wait_s: the n-th barrier span of each rank, from 1; in order of these."""
    nth = (pl.int_range(pl.len()).over("rank") + 1).alias("nth")
    spans = run.spans_of(stats).filter(pl.col("phase") == "barrier").sort("rank", "start_ns")
    return spans.select(nth, "rank", (pl.col("duration_ns") / 1e9).alias("wait_s")).sort("nth", "rank")


def _ranks(stats: OperationStats, waits: pl.DataFrame) -> Plot:
    """Waiting time of each rank, a colour per barrier; of very many ranks the one that waits longest of neighbours.

    Of more barriers than there are colours, those that cost least are shown as one.
    """
    cost = waits.group_by("nth").agg(pl.col("wait_s").sum()).sort("wait_s", descending=True)["nth"]
    shown = sorted(cost[: len(BARRIERS)])
    per_bar = -(-stats.ranks // _MOST_RANKS)
    neighbours = (pl.col("rank") // per_bar * per_bar).alias("from")
    bars = waits.group_by("nth", neighbours, maintain_order=True).agg(pl.col("wait_s").max())
    named = dict(zip((f"barrier {nth}" for nth in shown), BARRIERS, strict=False))
    rest = f"{plural(waits['nth'].n_unique() - len(shown), 'other barrier')}"
    name = pl.when(pl.col("nth").is_in(shown)).then(pl.format("barrier {}", "nth")).otherwise(pl.lit(rest))
    stacked = bars.group_by(name.alias("name"), "from", maintain_order=True).agg(pl.col("wait_s").sum())
    data = [
        columns(
            str(one),
            named.get(str(one), NEUTRAL),
            x=mine["from"],
            y=[round(value, 6) for value in mine["wait_s"]],
            hovertemplate=f"rank %{{x}}, {one}: %{{y:.4f}} s<extra></extra>",
        )
        for (one, *_), mine in stacked.group_by("name", maintain_order=True)
    ]
    few = f" (the longest wait of every {per_bar} neighbours)" if per_bar > 1 else ""
    arranged = layout(310, x=f"rank{few}", y="seconds waited", barmode="stack")
    description = f"Bars of the time that each rank of {title_of(stats)} waited in barriers{few}."
    return plot(f"{title_of(stats)}: who waited", data, arranged, description)


class _Barrier(NamedTuple):
    nth: int
    waits_s: list[float]  # of the ranks that have a span of it
    awaited: list[int]  # ranks
    skew_s: float
    hosts: set[str]  # of the awaited ranks


def _barrier(run: RunData, stats: OperationStats, nth: object, waits: pl.DataFrame) -> _Barrier:
    """The n-th barrier, from the waits of its ranks in the order of these.

    The rank that waits least came last, since all leave together. Ranks that have no n-th barrier span while the
    others wait did something else meanwhile: the others waited for these.
    """
    waits_s = waits["wait_s"].to_list()
    awaited = sorted(set(run.totals_of(stats)["rank"]) - set(waits["rank"]))
    skew_s = max(waits_s)
    if not awaited:
        awaited, skew_s = [waits["rank"][waits_s.index(min(waits_s))]], skew_s - min(waits_s)
    hosts = {run.host_of(stats.cycle, rank) for rank in awaited[:_NAMED]}
    return _Barrier(int(str(nth)), waits_s, awaited, skew_s, hosts)


def _sentence(run: RunData, stats: OperationStats, barriers: list[_Barrier]) -> str:
    """The costliest barrier, the ranks that the others waited for there, and why one came late."""
    costly = max(barriers, key=lambda one: fsum(one.waits_s))
    cost = f"{title_of(stats)}: barrier {costly.nth} cost {fsum(costly.waits_s):.3f} s of waiting"
    if costly.skew_s < _NO_SKEW_S:
        return f"{cost}; all ranks came to it together."
    waited = f"{cost}; the others waited for {_ranks_text(costly.awaited)}"
    if len(costly.awaited) > 1:
        return f"{waited}."
    why = explain_delay(run.tables, run.frames.operations, stats.group, costly.awaited[0], costly.skew_s)
    return f"{waited} by up to {costly.skew_s:.3f} s: {why}."


def _ranks_text(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED]))}{more}"


_COLUMNS: tuple[Column[_Barrier], ...] = (
    numbers("barrier", lambda one: one.nth),
    numbers("ranks waiting", lambda one: len(one.waits_s)),
    Column("waited for", lambda one: _ranks_text(one.awaited)),
    Column("on host", lambda one: ", ".join(sorted(one.hosts))),
    times("skew s", lambda one: one.skew_s),
    times("longest wait s", lambda one: max(one.waits_s)),
    times("median wait s", lambda one: median(one.waits_s)),
    times("total wait s", lambda one: fsum(one.waits_s)),
)


def _over_saves(run: RunData) -> list[Plot]:
    """Share of each save that ranks spend in barriers; no plot for a single save."""
    saves = [save for save in run.report.saves if save.wall]
    if len(saves) < 2:
        return []
    share = 100 * pl.col("busy_ns").fill_null(0) / pl.col("wall_ns")
    waited = run.tables.with_phase((pl.col("operation") == "save") & (pl.col("wall_ns") > 0), "barrier")
    low, middle, high = spread_over_saves(waited, share, saves)
    x = list(range(1, len(saves) + 1))
    text = [f"{save.tag}, cycle {save.cycle}" for save in saves]
    look = {"text": text, "hovertemplate": "%{text}: %{y:.1f} %<extra>%{fullData.name}</extra>"}
    data = [
        line("rank waiting most", MARK, x=x, y=high, **look),
        line("rank waiting least", THIRD_LINE, x=x, y=low, **FILLED, **look),
        line("median rank", LINE, x=x, y=middle, **look),
    ]
    arranged = layout(
        300,
        x="saves, in order",
        y="% of the save",
        xaxis={"tickmode": "linear", "tick0": 1, "dtick": -(-len(saves) // 12)},
        yaxis={"range": [0, 100]},
    )
    description = f"Lines of the share of {len(saves)} saves that ranks spent in barriers."
    return [plot("Waiting over the saves", data, arranged, description)]
