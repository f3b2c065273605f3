"""Figure 6: throughput of saves and loads: in total, per rank and per host, over the checkpoints of a run."""

from __future__ import annotations

import statistics
from typing import Any

import polars as pl

from ....common.formatting import plural, rate, seconds, size
from ....common.tables import Column, numbers, times
from ...metrics.results import OperationStats
from ..content import Content, Plot, Table, folded, missing, plot, table
from .colours import MARK
from .plots import FILLED, LINE, SECOND_LINE, THIRD_LINE, columns, layout, line
from .run_data import RunData, spread_over_saves, title_of, worst_of_neighbours

_LEAST_FOR_TREND = 6  # saves; of fewer a slope is noise
_TREND_SHOWN = 0.1  # change over the run, as a share, from which a trend is put into words
_OUTLIER_Z = 3.5  # of the modified z-score: Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993
_MOST_HOSTS = 40
_MOST_RANKS = 2048
_SQUARES = {"marker": {"symbol": "square", "size": 7}}


def draw(run: RunData) -> Content:
    """Total throughput of every save, the spread over ranks, and ranks and hosts of the shown save."""
    content = _content(run)
    shown = [stats for stats in (run.save, run.load) if stats is not None]
    took_s = sum(map(run.took_s, shown))
    if not content.tables or not shown:
        return content
    content.notes.insert(0, f"{_kinds(run)} took {seconds(took_s)} s together{run.share_text(took_s)}.")
    return folded(content) if run.is_small(took_s) else content


def _kinds(run: RunData) -> str:
    """What was counted, as the subject of a sentence."""
    report = run.report
    counted = [plural(len(alike), kind) for kind, alike in (("save", report.saves), ("load", report.loads)) if alike]
    return " and ".join(counted)


def _content(run: RunData) -> Content:
    report = run.report
    measured = [s for s in report.saves if s.io_GBps is not None or s.blocked_GBps is not None]
    loads = [load for load in report.loads if load.io_GBps is not None]
    timed = [s for s in report.saves if s.blocked_s is not None]
    plots = [_blocked(timed)] if len(timed) > 1 else []
    if not measured and not loads:
        reason = "No save or load counted its bytes, so no throughput can be given."
        return Content(plots, [_table(timed)], [reason, *_outliers(timed)]) if timed else missing(reason)
    per_rank = _per_rank(run)
    notes: list[str] = []
    if measured:
        plots.append(_total(measured))
        if not per_rank.is_empty():
            plots.append(_spread(measured, per_rank, "rank"))
            every_host = _hosts(run, per_rank)
            if every_host["host"].n_unique() > 1:
                plots.append(_spread(measured, every_host, "host"))
        notes += [*_trend(measured), *_outliers(measured)]
    else:
        notes.append("No save counted its bytes.")
    if run.save in measured and run.save is not None:
        mine = per_rank.filter(pl.col("group") == run.save.group)
        hosts = _hosts(run, mine)
        if mine.is_empty():
            notes.append("Ranks and hosts are not recorded one by one.")
        else:
            plots.append(_ranks(run.save, mine))
        if hosts.height > 1:
            plots.append(_host_plot(run.save, hosts))
        elif hosts.height == 1:
            notes.append("All ranks ran on one host, so hosts are not compared.")
    return Content(plots, [_table([*measured, *loads])], notes)


def _per_rank(run: RunData) -> pl.DataFrame:
    """group, rank, bytes, io_ns, blocked_ns, io_GBps, blocked_GBps of every rank in every save."""
    bytes_of = run.frames.operations.select("group", "rank", "bytes")
    flushed = run.tables.with_phase(pl.col("operation") == "save", "flush")
    measured = flushed.select("group", "rank", "blocked_ns", pl.col("busy_ns").alias("io_ns")).join(
        bytes_of, on=["group", "rank"]
    )

    def speed(time: str) -> pl.Expr:  # bytes per ns are GB/s; nothing where nothing was moved or timed
        known = (pl.col("bytes") > 0) & (pl.col(time) > 0)
        return pl.when(known).then(pl.col("bytes") / pl.col(time))

    return measured.with_columns(speed("io_ns").alias("io_GBps"), speed("blocked_ns").alias("blocked_GBps"))


def _names(saves: list[OperationStats]) -> list[str]:
    """One name per save, each once: a tag may be saved in several cycles."""
    names = [f"{save.tag or 'save'} (cycle {save.cycle})" for save in saves]
    return [f"{name} #{i}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _over_saves(saves: list[OperationStats], y: str, **more: Any) -> dict[str, Any]:
    names = _names(saves)
    x: dict[str, Any] = {"type": "category"}
    if len(names) > 24:
        x |= {"tickmode": "array", "tickvals": names[:: -(-len(names) // 12)]}
    return layout(330, x="saves, in order", y=y, xaxis=x, yaxis={"rangemode": "tozero"}, **more)


def _blocked(saves: list[OperationStats]) -> Plot:
    """How long each save blocked training."""
    data = [line("blocked_s", SECOND_LINE, x=_names(saves), y=[save.blocked_s for save in saves], **_SQUARES)]
    description = f"Line of the time that each of {len(saves)} saves blocked training."
    return plot("Training blocked, over the saves", data, _over_saves(saves, "seconds"), description)


def _total(saves: list[OperationStats]) -> Plot:
    names, io = _names(saves), [save.io_GBps for save in saves]
    blocked = [save.blocked_GBps for save in saves]
    data = [line("io_GBps", LINE, x=names, y=io), line("blocked_GBps", SECOND_LINE, x=names, y=blocked, **_SQUARES)]
    last = saves[-1]
    description = (
        f"Lines of total throughput over {plural(len(saves), 'save')}. The last: {rate(last.io_GBps)} GB/s to storage, "
        f"{rate(last.blocked_GBps)} GB/s of blocked time."
    )
    return plot("In total, over the saves", data, _over_saves(saves, "GB/s"), description)


def _spread(saves: list[OperationStats], speeds: pl.DataFrame, unit: str) -> Plot:
    """Lowest, median and highest io_GBps of `unit`s (rank or host) in each save; `speeds` has group, io_GBps."""
    low, median, high = spread_over_saves(speeds, pl.col("io_GBps"), saves)
    names = _names(saves)
    thin = {"mode": "lines+markers", "marker": {"size": 4}}
    data = [
        line(f"fastest {unit}", THIRD_LINE, x=names, y=high, **thin),
        line(f"slowest {unit}", MARK, x=names, y=low, **FILLED, **thin),
        line(f"median {unit}", LINE, x=names, y=median),
    ]
    description = f"Lines of the slowest, the median and the fastest {unit}'s own write throughput in each save."
    return plot(f"Per {unit}, over the saves", data, _over_saves(saves, f"GB/s of one {unit}"), description)


def _ranks(save: OperationStats, mine: pl.DataFrame) -> Plot:
    """Every rank of one save; of very many, the slowest of neighbours."""
    slowness = -pl.col("io_GBps").fill_null(float("inf"))
    points, per_point = worst_of_neighbours(mine.sort("rank"), _MOST_RANKS, slowness)
    look = {"mode": "markers", "hovertemplate": "rank %{x}: %{y:.4g} GB/s<extra></extra>"}
    squares = look | {"marker": {"symbol": "square", "size": 6}}
    data = [
        line("io_GBps", LINE, x=points["rank"], y=points["io_GBps"], **look),
        line("blocked_GBps", SECOND_LINE, x=points["rank"], y=points["blocked_GBps"], **squares),
    ]
    few = f" (the slowest of every {per_point} neighbours)" if per_point > 1 else ""
    description = f"Write throughput of each rank of {title_of(save)}{few}."
    arranged = layout(300, x=f"rank{few}", y="GB/s of one rank", yaxis={"rangemode": "tozero"})
    return plot(f"{title_of(save)}: rank by rank", data, arranged, description)


def _hosts(run: RunData, ranks: pl.DataFrame) -> pl.DataFrame:
    """group, host, bytes, io_GBps: bytes of the host's ranks over its slowest rank's time; slowest host first."""
    cycles = run.frames.operations.select("group", "cycle").unique()
    return (
        ranks.join(cycles, on="group")
        .join(run.hosts, on=["cycle", "rank"])
        .group_by("group", "host")
        .agg(pl.col("bytes").sum(), pl.col("io_ns").max())
        .filter(pl.col("io_ns") > 0)
        .with_columns((pl.col("bytes") / pl.col("io_ns")).alias("io_GBps"))
        .sort("io_GBps", "host")
    )


def _host_plot(save: OperationStats, hosts: pl.DataFrame) -> Plot:
    shown = hosts.head(_MOST_HOSTS)
    few = f" (the {_MOST_HOSTS} slowest of {hosts.height})" if hosts.height > _MOST_HOSTS else ""
    hover = "%{x}: %{y:.4g} GB/s<extra></extra>"
    data = [columns("io_GBps", LINE, x=shown["host"], y=shown["io_GBps"], hovertemplate=hover)]
    arranged = layout(300, x=f"host{few}", y="GB/s of one host", xaxis={"type": "category"})
    description = f"Write throughput of each host in {title_of(save)}{few}; {shown['host'][0]} is slowest."
    return plot(f"{title_of(save)}: host by host", data, arranged, description)


def _trend(saves: list[OperationStats]) -> list[str]:
    """Sentences on throughput that rises or falls: by the median of all pairwise slopes (Theil 1950, Sen 1968)."""
    sentences = []
    for name in ("io_GBps", "blocked_GBps"):
        points = [(i, value) for i, save in enumerate(saves) if (value := getattr(save, name)) is not None]
        if len(points) < _LEAST_FOR_TREND:
            continue
        points = points[-400:]  # enough, and the pairs are squared
        slope = statistics.median((b - a) / (j - i) for i, a in points for j, b in points if j > i)
        median = statistics.median(value for _, value in points)
        change = slope * (points[-1][0] - points[0][0]) / median if median else 0.0
        if abs(change) >= _TREND_SHOWN:
            word = "rises" if change > 0 else "falls"
            over = f"{abs(change):.0%} of its median over {len(points)} saves"
            sentences.append(f"{name} {word} by {over} (slope after Theil and Sen).")
    return sentences


def _outliers(saves: list[OperationStats]) -> list[str]:
    """Saves that blocked training for unusually long, by the modified z-score."""
    known = [(save, save.blocked_s) for save in saves if save.blocked_s is not None]
    if len(known) < _LEAST_FOR_TREND:
        return []
    median = statistics.median(blocked_s for _, blocked_s in known)
    deviation = statistics.median(abs(blocked_s - median) for _, blocked_s in known)
    far = [(save, took) for save, took in known if deviation and 0.6745 * (took - median) / deviation > _OUTLIER_Z]
    if not far:
        return []
    named = ", ".join(f"{save.tag} ({seconds(took)} s)" for save, took in far[:5])
    return [f"{plural(len(far), 'outlier')}: blocked for long against the median of {median:.3f} s: {named}."]


_COLUMNS: tuple[Column[OperationStats], ...] = (
    Column("operation", lambda stats: f"{stats.operation} {stats.tag or ''}"),
    numbers("cycle", lambda stats: stats.cycle),
    Column("outcome", lambda stats: stats.outcome),
    numbers("bytes", lambda stats: stats.bytes, size),
    numbers("files", lambda stats: stats.num_files),
    times("blocked s", lambda stats: stats.blocked_s if stats.operation == "save" else None),
    times("durable s", lambda stats: stats.durable_s),
    times("wall s", lambda stats: stats.wall.max_s if stats.wall else None),
    numbers("critical rank", lambda stats: stats.critical_rank),
    numbers("io_GBps", lambda stats: stats.io_GBps, rate),
    numbers("blocked_GBps", lambda stats: stats.blocked_GBps, rate),
)


def _table(operations: list[OperationStats]) -> Table:
    return table("Saves and loads of the run", _COLUMNS, operations)
