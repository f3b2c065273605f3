"""Figure 2: where a save, a load and a start spend their time, blocking and background apart."""

from __future__ import annotations

from typing import Any

import polars as pl

from restart_trace.schema import PHASES

from ....common.formatting import digits_for, plural, seconds
from ....common.tables import Column
from ...common.intervals import busy
from ...common.phase_kinds import AFTERWARDS
from ...metrics.phases import PHASE_NAME
from ...metrics.results import OperationStats, PhaseStats, StartStats, Stats
from ..content import Content, Plot, Table, missing, plot, table
from ..phase_table import (
    PhaseLine,
    blocking_column,
    critical_columns,
    leaves,
    phase_lines,
    time_columns,
    volume_columns,
)
from .colours import NEUTRAL, UNATTRIBUTED, colour
from .plots import bar, lanes, phase_bars
from .run_data import RunData, title_of, wall_of

_BACKGROUND = "in the background"
_BLOCKING = "blocking"
_REST_NS = (pl.col("wall_ns") - pl.col("covered_ns")).clip(lower_bound=0)  # of a rank that finished


def draw(run: RunData) -> Content:
    """The shown save, load and start: stacked for three ranks, the spread over all ranks, and the numbers."""
    if not run.shown:
        return missing("No save, load or start-up was recorded to its end on any rank.")
    content = Content()
    for stats in run.shown:
        plots: list[Plot] = []
        if stats.phases and run.has_ranks(stats):
            # The restart over all ranks stands at the head of the page.
            plots = [_spread(stats)] if isinstance(stats, StartStats) else [_stacked(run, stats), _spread(stats)]
        content.add(Content(plots, [_table(stats)]), _result(run, stats), folded=run.has_small(stats))
    content.notes.extend(
        f"No {name} was recorded to its end."
        for name, operation in (("save", run.save), ("load", run.load))
        if operation is None
    )
    return content


def _result(run: RunData, stats: Stats) -> str:
    """How long it took, and its longest phase."""
    took_s = wall_of(stats).max_s
    text = f"{title_of(stats)} took {seconds(took_s, digits_for(took_s))} s"
    rows = leaves(stats.phases)
    if not rows:
        return f"{text}; no phases are recorded, only the whole."
    name, entry = max(rows, key=lambda row: row[1].time.max_s)
    longest = seconds(entry.time.max_s, digits_for(took_s))
    of_all = run.took_s(stats)
    kind = "start" if isinstance(stats, StartStats) else stats.kind
    return f"{text}, {longest} s of it in {name}; all {kind}s together {seconds(of_all)} s{run.share_text(of_all)}."


def _stacked(run: RunData, stats: Stats) -> Plot:
    """Phases one after the other, on the critical, the median and the fastest rank."""
    ranks = run.three_ranks(stats)
    times = _times(run, stats, [rank for _, rank in ranks])
    rest_ns = dict(run.totals_of(stats).select("rank", _REST_NS).iter_rows())
    names: list[str] = []
    series: dict[str, dict[str, float]] = {}
    for word, rank in ranks:
        mine = times.filter(pl.col("rank") == rank)
        in_background = bool(mine["background"].any())
        for background in (False, True)[: 1 + in_background]:
            lane = f"rank {rank} ({word})" + (f", {_BACKGROUND}" if background else "")
            names.append(lane)
            part = mine.filter(pl.col("background") == background)
            for phase, busy_ns in part.select("phase", "busy_ns").iter_rows():
                series.setdefault(phase, {})[lane] = busy_ns / 1e9
        # Beside a background that overlaps it, what is left over has no place in either row.
        if not in_background:
            series.setdefault(UNATTRIBUTED, {})[names[-1]] = rest_ns[rank] / 1e9
    data = phase_bars(series, [name for name in [*_order(stats), UNATTRIBUTED] if name in series], 4)
    arranged = lanes(names, 34, 130, x="seconds (busy time)", barmode="stack")
    wall_s = wall_of(stats).at_critical_s or 0.0
    description = (
        f"Stacked bars of the phases of {title_of(stats)} on {plural(len(ranks), 'rank')}; the critical rank, "
        f"{stats.critical_rank}, took {wall_s:.3f} s in all."
    )
    title = f"{title_of(stats)}: phases of the critical, the median and the fastest rank"
    return plot(title, data, arranged, description)


def _times(run: RunData, stats: Stats, ranks: list[int]) -> pl.DataFrame:
    """rank, phase (with its detail), background, busy_ns of some ranks."""
    during = ~pl.col("phase").cast(pl.String).is_in(AFTERWARDS)
    here = (pl.col("group") == stats.group) & pl.col("rank").is_in(ranks)
    if isinstance(stats, StartStats):
        phases = run.tables.phases.filter(here & during)
        # The load is one block here: its own phases overlap in threads. They have a figure of their own.
        whole = phases.filter(pl.col("detail") == "")
        return whole.select("rank", PHASE_NAME, pl.lit(False).alias("background"), "busy_ns")
    spans = run.frames.spans_of(here, during).with_columns(
        pl.col("detail").cast(pl.String).fill_null(""), (~pl.col("blocking")).alias("background")
    )
    parts = busy(spans, ["rank", "phase", "detail", "background"])
    return parts.select("rank", PHASE_NAME, "background", "busy_ns")


def _order(stats: Stats) -> list[str]:
    """Names of phases, with their details, in the order in which they come."""
    if not isinstance(stats, OperationStats):
        return [phase.name for phase in stats.phases]
    return [
        f"{phase}/{detail}" if detail else phase
        for phase, details in PHASES[stats.operation].items()
        for detail in (details or ("",))
    ]


def _spread(stats: Stats) -> Plot:
    """Fastest to slowest rank of every phase, with the median."""
    rows = leaves(stats.phases)
    longest = max((entry.time.max_s for _, entry in rows), default=0.0)
    digits = digits_for(longest)
    data: list[dict[str, Any]] = []
    for background, word in ((False, _BLOCKING), (True, _BACKGROUND)):
        mine = [(name, entry) for name, entry in rows if (entry.blocking == "none") == background]
        if not mine:
            continue
        pattern: dict[str, Any] = {"pattern": {"shape": "/", "size": 5}} if background else {}
        data.append(
            bar(
                word,
                "",
                x=[entry.time.spread_s for _, entry in mine],
                y=[name for name, _ in mine],
                base=[entry.time.min_s for _, entry in mine],
                hover=[_hover(name, entry, digits) for name, entry in mine],
                marker={"color": [colour(name) for name, _ in mine], "line": {"width": 1, "color": NEUTRAL}} | pattern,
                width=0.55,
                showlegend=False,
            )
        )
        # The bars have the colours of their phases, the legend none of these.
        in_legend = {"marker": {"color": NEUTRAL} | pattern, "hoverinfo": "skip"}
        data.append(bar(word, NEUTRAL, x=[0.0], y=[mine[0][0]], hover=[""], **in_legend))
    data += _marks(rows, digits)
    axis = {"range": [0, longest * 1.35 or 1]}
    title = "seconds (busy time): fastest to slowest rank"
    arranged = lanes([name for name, _ in rows], 26, 120, x=title, barmode="overlay", xaxis=axis)
    slowest = max(rows, key=lambda row: row[1].time.max_s, default=None)
    words = f"; the longest is {slowest[0]} with {slowest[1].time.max_s:.3f} s" if slowest else ""
    description = f"Range of the ranks' times in {len(rows)} phases of {title_of(stats)}{words}."
    return plot(f"{title_of(stats)}: spread over the ranks", data, arranged, description)


def _marks(rows: list[tuple[str, PhaseStats]], digits: int) -> list[dict[str, Any]]:
    """The median of every phase, and at its end the slowest rank."""
    both = {"type": "scatter", "y": [name for name, _ in rows], "hoverinfo": "skip"}
    median = {
        "mode": "markers",
        "name": "median rank",
        "x": [entry.time.median_s for _, entry in rows],
        "marker": {"symbol": "line-ns", "size": 16, "line": {"width": 2.5, "color": "#111111"}},
        "meta": "ink",
    }
    slowest = {
        "mode": "text",
        "showlegend": False,
        "x": [entry.time.max_s for _, entry in rows],
        "text": [f"  {seconds(e.time.max_s, digits)} s, rank {e.time.slowest_rank}" for _, e in rows],
        "textposition": "middle right",
        "cliponaxis": False,
    }
    return [both | median, both | slowest]


def _hover(name: str, entry: PhaseStats, digits: int) -> str:
    time = entry.time
    return (
        f"{name}: slowest {seconds(time.max_s, digits)} s (rank {time.slowest_rank}), median "
        f"{seconds(time.median_s, digits)} s, fastest {seconds(time.min_s, digits)} s; "
        f"{plural(entry.ranks, 'rank')}"
    )


def _table(stats: Stats) -> Table:
    wall = wall_of(stats)
    digits = digits_for(wall.max_s)
    rank = "critical rank" if stats.critical_rank is None else f"critical rank {stats.critical_rank}"
    columns = [
        Column[PhaseLine]("phase", lambda line: line.name),
        *time_columns(digits),
        *critical_columns(digits, f"{rank} s"),
        *volume_columns(),
        blocking_column(),
    ]
    lines = phase_lines(stats.phases)
    lines += [PhaseLine(UNATTRIBUTED, stats.unattributed)] if stats.unattributed else []
    whole = f"whole {stats.kind}" if isinstance(stats, OperationStats) else "to the first step"
    caption = f"{title_of(stats)}, phase by phase ({whole}: {wall.max_s:.{digits}f} s)"
    return table(caption, columns, lines)
