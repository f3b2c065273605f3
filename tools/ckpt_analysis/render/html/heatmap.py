"""Figure 3: every rank's time in every phase, as a map; by host, or by position in the layout."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import polars as pl

from ....common.formatting import plural, seconds
from ....common.tables import Column, numbers, times
from ...common.phase_kinds import SYNCHRONISING, WAITING
from ...findings.comparisons import largest_excess, slow_ranks
from ...metrics.results import OperationStats, Stats
from ..content import Content, Plot, Table, Variant, missing, table
from ..phase_table import leaves
from .colours import MARK
from .plots import MARGIN, axis, matrix
from .run_data import RunData, title_of

MEETINGS = {*WAITING} & {*SYNCHRONISING}  # phases in which a rank does nothing but wait for the last one
COLUMNS = 1024  # of the map: what a screen shows. More ranks share columns
_TICKS = 12
_MAP = 0.93  # of the plot's height; marks are above
_WORST = 32  # rows of the table
_NAMED = 8  # ranks in a sentence
_VALUES = 12  # ranks: the cells of so many have room for their values
_NOISE = 0.1  # of the longest time of a row: a smaller excess is not stretched over all colours
_ORDERS = {"by host": ["host", "rank"], "by TP × PP × DP": ["pp", "dp", "tp", "rank"]}


def draw(run: RunData) -> Content:
    """A map for each of the shown save, load and start."""
    shown = [stats for stats in run.shown if stats.phases and run.has_ranks(stats)]
    if not shown:
        return missing("No operation was recorded rank by rank and phase by phase, so ranks cannot be compared.")
    compared = [stats.group for stats in shown if not _has_failed(stats)]
    slow = slow_ranks(run.tables.totals.filter(pl.col("group").is_in(compared)))
    flagged = [set(slow.filter(pl.col("group") == stats.group)["rank"]) for stats in shown]
    content = Content()
    for stats, ranks in zip(shown, flagged, strict=True):
        part = Content([_map(run, stats, ranks)], [_table(run, stats)])
        content.add(part, _result(stats, ranks), folded=not ranks and run.has_small(stats))
    if (ranks := shown[0].ranks) > COLUMNS:
        content.notes.append(
            f"The {ranks} ranks share {COLUMNS} columns: each cell is the worst of {-(-ranks // COLUMNS)} or fewer "
            "neighbouring ranks, so no slow rank is lost. The tables name the slowest ranks one by one."
        )
    return content


def _has_failed(stats: Stats) -> bool:
    """Then some ranks did only a part of it."""
    return isinstance(stats, OperationStats) and stats.outcome == "failed"


def _result(stats: Stats, flagged: set[int]) -> str:
    if _has_failed(stats):
        return f"{title_of(stats)}: failed, so that its ranks cannot be compared."
    if not flagged:
        return f"{title_of(stats)}: no rank works much longer than the others."
    named = ", ".join(map(str, sorted(flagged)[:_NAMED]))
    more = f" and {len(flagged) - _NAMED} more" if len(flagged) > _NAMED else ""
    return f"{title_of(stats)}: rank{'s' if len(flagged) > 1 else ''} {named}{more} worked much longer than the others."


def _map(run: RunData, stats: Stats, flagged: set[int]) -> Plot:
    ranks = _ranks(run, stats)
    names = [name for name, _ in leaves(stats.phases)]
    variants = [
        Variant(word, *arranged(ranks.sort(order), names, flagged, order[0])) for word, order in _ORDERS.items()
    ]
    named = ", ".join(map(str, sorted(flagged)))
    marked = f"; marked as slower than the others: rank {named}" if flagged else ""
    description = f"Map of {ranks.height} ranks and {len(names)} phases of {title_of(stats)}{marked}."
    return Plot(f"{title_of(stats)}: {plural(ranks.height, 'rank')}", variants, description)


def _ranks(run: RunData, stats: Stats) -> pl.DataFrame:
    """A row per rank: its place, and a column of seconds per phase."""
    places = run.places.filter(pl.col("cycle") == stats.cycle)
    table = run.totals_of(stats).select("rank").join(places, on="rank", how="left", maintain_order="left")
    mine = run.tables.phases.filter(pl.col("group") == stats.group)
    for name, _ in leaves(stats.phases):
        phase, _, detail = name.partition("/")
        part = mine.filter((pl.col("phase") == phase) & (pl.col("detail") == detail))
        column = part.select("rank", (pl.col("busy_ns") / 1e9).alias(name))
        table = table.join(column, on="rank", how="left", maintain_order="left")
    return table.with_columns(pl.col(name).fill_null(0.0) for name, _ in leaves(stats.phases))


def arranged(
    table: pl.DataFrame, names: list[str], flagged: set[int], group_by: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Data and layout of a map whose columns are the rows of `table`, or bins of them."""
    per_column = -(-table.height // COLUMNS)
    binned = (
        table.with_row_index("row")
        .with_columns((pl.col("row") // per_column).alias("column"))
        .group_by("column", maintain_order=True)
        .agg(
            pl.col("rank").first(),
            pl.col("rank").last().alias("last"),
            pl.col("rank").is_in(sorted(flagged)).any().alias("slow"),
            pl.col("host", "tp", "pp", "dp").first(),
            *(pl.col(name).max() for name in names),
        )
    )
    labels = [_label(row, per_column) for row in binned.iter_rows(named=True)]
    ticks = _ticks(binned[group_by].to_list(), labels, group_by)
    data = [_row(place, name, labels, binned[name].to_list()) for place, name in enumerate(names)]
    scale = next((row for row in data if not row["reversescale"]), None)
    if scale is not None:
        ends = {"tickmode": "array", "tickvals": [scale["zmin"], scale["zmax"]], "ticktext": ["median", "slowest"]}
        bar = {"title": {"text": "in its row"}, "thickness": 12, "outlinewidth": 0}
        scale |= {"showscale": True, "colorbar": bar | ends}
    marked = [label for label, is_slow in zip(labels, binned["slow"], strict=True) if is_slow]
    if marked:
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "slower than the others",
                "x": marked,
                "y": [0.5] * len(marked),
                "yaxis": "y2",
                "marker": {"symbol": "triangle-down", "size": 11, "color": MARK},
                "hovertemplate": "%{x}<br>slower than the others<extra></extra>",
                "cliponaxis": False,
                "showlegend": False,
            }
        )
    layout = {
        "height": 26 * len(names) + 110,
        "margin": MARGIN,
        "xaxis": axis("ranks, " + ("in order of their hosts" if group_by == "host" else "stage by stage"))
        | {"type": "category", "tickmode": "array", **ticks},
        # Numbers, since plotly puts a single row of categories in the wrong place.
        "yaxis": axis("")
        | {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": names, "showgrid": False}
        | {"range": [len(names) - 0.5, -0.5], "domain": [0, _MAP]},
        # For the marks above the map.
        "yaxis2": {"domain": [_MAP, 1], "range": [0, 1], "visible": False, "fixedrange": True},
    }
    return data, layout


def _row(place: int, name: str, labels: list[str], values: list[float]) -> dict[str, Any]:
    """One phase, on a scale of its own from the median rank to the slowest.

    Waiting is inverted: who waited least came last, and is as bright as who worked longest.
    """
    waits = any(part in MEETINGS for part in name.split("/"))
    middle, most = median(values), max(values)
    span = max(middle - min(values) if waits else most - middle, _NOISE * most, 1e-9)
    return {
        "type": "heatmap",
        "x": labels,
        "name": name,
        "y": [place],
        "z": matrix([values]),
        "colorscale": "Cividis",  # made for colour-blind readers
        "reversescale": waits,
        "zmin": middle - span if waits else middle,
        "zmax": middle if waits else middle + span,
        "showscale": False,
        "hovertemplate": f"{name}<br>%{{x}}<br>%{{z:.4f}} s{' waited' if waits else ''}<extra></extra>",
    } | ({"texttemplate": "%{z:.3f}", "textfont": {"size": 11}} if len(values) <= _VALUES else {})


def _label(row: dict[str, Any], per_column: int) -> str:
    place = f"{row['host']}, tp {row['tp']} pp {row['pp']} dp {row['dp']}"
    if per_column == 1:
        return f"rank {row['rank']} ({place})"
    return f"ranks from {row['rank']} to {row['last']} (from {place})"


def _ticks(groups: Sequence[Any], labels: list[str], group_by: str) -> dict[str, list[str]]:
    """A tick where a host or a stage begins; of very many every n-th. Few ranks have a tick each."""
    if len(labels) <= 16:
        shown = [label.split(" (")[0].removeprefix("rank ") for label in labels]
        return {"tickvals": labels, "ticktext": shown}
    first = [i for i, group in enumerate(groups) if not i or groups[i - 1] != group]
    first = first[:: -(-len(first) // _TICKS)]
    word = "" if group_by == "host" else f"{group_by} "
    return {"tickvals": [labels[i] for i in first], "ticktext": [f"{word}{groups[i]}" for i in first]}


_COLUMNS: tuple[Column[dict[str, Any]], ...] = (
    numbers("rank", lambda row: row["rank"]),
    Column("host", lambda row: str(row["host"])),
    Column("tp, pp, dp", lambda row: f"{row['tp']}, {row['pp']}, {row['dp']}"),
    times("own s", lambda row: row["own_ns"] / 1e9, 3),
    numbers("over the median s", lambda row: row["own_ns"] / 1e9 - row["median_s"], "{:+.3f}".format),
    Column("wall s", lambda row: seconds(row["wall_ns"] / 1e9), lambda row: row["wall_ns"]),
    Column("phase above its median most", lambda row: row["phase"] or ""),
    numbers(
        "above its median s", lambda row: ((row["ranks_ns"] or 0) - (row["median_ns"] or 0)) / 1e9, "{:+.3f}".format
    ),
)


def _table(run: RunData, stats: Stats) -> Table:
    """The ranks that worked longest."""
    totals = run.totals_of(stats).drop_nulls("wall_ns")
    median_s = (totals.select(pl.col("own_ns").median()).item() or 0) / 1e9
    worst = totals.sort("own_ns", "rank", descending=[True, False]).head(_WORST)
    worst = worst.with_columns(pl.lit(median_s, pl.Float64).alias("median_s"))
    places = run.places.filter(pl.col("cycle") == stats.cycle)
    for further in (places, largest_excess(run.tables, stats.group)):
        worst = worst.join(further, on="rank", how="left", maintain_order="left")
    few = f"the {worst.height} longest of {totals.height}" if worst.height < totals.height else "all ranks"
    caption = f"{title_of(stats)}: own time, {few}"
    return table(caption, _COLUMNS, worst.iter_rows(named=True), folded=True)
