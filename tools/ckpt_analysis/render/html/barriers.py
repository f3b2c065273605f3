"""Figure 7: time spent in barriers: who waited, and for whom."""

from __future__ import annotations

from typing import Any

import polars as pl

from ...common.formatting import plural, seconds
from ...findings.comparisons import what_held_up
from ...metrics.results import OperationStats
from .content import Cell, Content, Plot, Table, missing, number, plot
from .plots import BAND, LINE, MARK, THIRD_LINE, layout, line
from .run_data import RunData, title_of

_MOST_RANKS = 2048
_NAMED = 4
_TOGETHER_S = 0.001  # of skew: below, nobody came late
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
    others wait did something else meanwhile: then it is they who were waited for.
    """
    mine = waits.filter(pl.col("nth") == nth)
    everyone = set(run.tables.walls.filter(pl.col("group") == stats.group)["rank"])
    absent = sorted(everyone - set(mine["rank"]))
    shortest: Any = mine["wait_s"].min()
    longest: Any = mine["wait_s"].max()
    if absent:
        return absent, longest
    return [mine.filter(pl.col("wait_s") == shortest)["rank"].sort()[0]], longest - shortest


def _sentence(run: RunData, stats: OperationStats, waits: pl.DataFrame) -> str:
    """Who was waited for in the barrier that cost most, and what held it up."""
    costly = waits.group_by("nth").agg(pl.col("wait_s").sum()).sort("wait_s", "nth", descending=[True, False])
    nth, total = costly.row(0)
    ranks, skew = _last_to_come(run, stats, waits, nth)
    cost = f"{title_of(stats)}: barrier {nth} cost {total:.3f} rank-seconds"
    if skew < _TOGETHER_S:
        return f"{cost}; all ranks came to it together."
    waited = f"{cost}; the others waited for {_who(ranks)}"
    if len(ranks) > 1:
        return f"{waited}."
    why = what_held_up(run.tables, run.frames.operations, stats.group, ranks[0], skew)
    return f"{waited} by up to {skew:.3f} s: {why}."


def _who(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED]))}{more}"


def _table(run: RunData, stats: OperationStats, waits: pl.DataFrame) -> Table:
    header = [
        "barrier",
        "ranks that waited",
        "waited for",
        "on host",
        "skew s",
        "longest wait s",
        "median wait s",
    ]
    header.append("rank-seconds")
    rows = []
    for nth in sorted(waits["nth"].unique()):
        mine = waits.filter(pl.col("nth") == nth)["wait_s"]
        ranks, skew = _last_to_come(run, stats, waits, nth)
        hosts = sorted({run.host_of(stats.cycle, rank) for rank in ranks[:_NAMED]})
        values = [skew, mine.max(), mine.median(), mine.sum()]
        rows.append(
            [
                number(nth, str(nth)),
                number(len(mine), str(len(mine))),
                Cell(_who(ranks)),
                Cell(", ".join(hosts)),
                *(number(float(str(value)), seconds(float(str(value)), 4)) for value in values),
            ]
        )
    return Table(f"{title_of(stats)}: {plural(len(rows), 'barrier')}", header, rows)


def _over_saves(run: RunData) -> Plot | None:
    """Share of each save that ranks spend in barriers; None for a single save."""
    saves = [save for save in run.report.saves if save.wall]
    if len(saves) < 2:
        return None
    waited = run.tables.phases.filter(
        (pl.col("operation") == "save") & (pl.col("phase") == "barrier") & (pl.col("detail") == "")
    )
    share = 100 * pl.col("busy_ns").fill_null(0) / pl.col("wall_ns")
    table = (
        run.tables.walls.filter((pl.col("operation") == "save") & (pl.col("wall_ns") > 0))
        .join(waited.select("group", "rank", "busy_ns"), on=["group", "rank"], how="left")
        .group_by("group")
        .agg(share.min().alias("low"), share.median().alias("usual"), share.max().alias("high"))
    )
    by_group = {row["group"]: row for row in table.iter_rows(named=True)}
    rows = [by_group.get(save.group, {}) for save in saves]
    x = list(range(1, len(saves) + 1))
    text = [f"{save.tag}, cycle {save.cycle}" for save in saves]
    look = {"text": text, "hovertemplate": "%{text}: %{y:.1f} %<extra>%{fullData.name}</extra>"}
    data = [
        line("rank that waits most", MARK, x=x, y=[row.get("high") for row in rows], **look),
        line(
            "rank that waits least", THIRD_LINE, x=x, y=[row.get("low") for row in rows],
            fill="tonexty", fillcolor=BAND, **look,
        ),
        line("median rank", LINE, x=x, y=[row.get("usual") for row in rows], **look),
    ]  # fmt: skip
    arranged = layout(
        300,
        x="saves, in order",
        y="% of the save",
        xaxis={"tickmode": "linear", "tick0": 1, "dtick": -(-len(saves) // 12)},
        yaxis={"range": [0, 100]},
    )
    description = f"Lines of the share of {len(saves)} saves that ranks spent in barriers."
    return plot("Waiting over the saves", data, arranged, description)
