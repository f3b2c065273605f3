"""Figure 5: the files of a checkpoint: how many, how large, how long each took."""

from __future__ import annotations

import math
from typing import Any

import polars as pl

from ....common.formatting import NOT_RECORDED, plural, rate, seconds, size
from ....common.tables import Column, numbers, times
from ...metrics.results import OperationStats
from ..content import Content, Plot, Table, folded, missing, plot, table
from .colours import NEUTRAL, SERIES
from .plots import columns, layout
from .run_data import RunData, title_of

_MOST_POINTS = 3000
_SLOWEST_KEPT = 500
_SLOWEST_NAMED = 25
_SKEW = 2.0  # of the rank with most bytes over the mean rank; above, the figure says so

# Kind -> what its file names look like (docs/engines.md), the first that fits; and its colour and mark.
_KINDS: list[tuple[str, str, str, str]] = [
    ("optimizer state", r"optim_states", SERIES[0], "circle"),
    ("layer weights", r"(^|/)layer_\d+", SERIES[1], "square"),
    ("model states", r"model_states|mp_rank_", SERIES[2], "diamond"),
    ("file of a rank", r"(^|/)rank_\d+", SERIES[3], "triangle-up"),
    ("metadata", r"\.json$|\.metadata$|(^|/)latest", SERIES[4], "cross"),
    ("other", r"", NEUTRAL, "x"),
]


def draw(run: RunData) -> Content:
    """Files of the shown save; of the shown load if there is no save or it names no files."""
    for stats, phase, detail in ((run.save, "flush", "write"), (run.load, "load", "read")):
        if stats is not None:
            files = _files(run, stats, phase, detail)
            if not files.is_empty():
                content = _content(run, stats, files)
                return folded(content) if run.has_small(stats) else content
    return missing("No file was named by a save or load, so there is nothing to show of files.")


def _files(run: RunData, stats: OperationStats, phase: str, detail: str) -> pl.DataFrame:
    """rank, file, bytes, took_s, fsync_s, kind of every file; took_s is the time in the phase, all details."""
    named = run.spans_of(stats).filter((pl.col("phase") == phase) & pl.col("file").is_not_null())
    named = named.with_columns(pl.col("file").cast(pl.String))
    moved = pl.col("detail") == detail
    files = named.group_by("rank", "file").agg(
        pl.col("bytes").filter(moved).sum(),
        (pl.col("duration_ns").sum() / 1e9).alias("took_s"),
        (pl.col("duration_ns").filter(pl.col("detail") == "fsync").sum() / 1e9).alias("fsync_s"),
    )
    kind = pl.lit(_KINDS[-1][0])
    for name, pattern, _, _ in reversed(_KINDS[:-1]):
        kind = pl.when(pl.col("file").str.contains(pattern)).then(pl.lit(name)).otherwise(kind)
    return files.with_columns(kind.alias("kind")).sort("took_s", "rank", "file", descending=[True, False, False])


def _content(run: RunData, stats: OperationStats, files: pl.DataFrame) -> Content:
    thinned = _thinned(files)
    notes = _warnings(run, stats, files)
    if thinned.height < files.height:
        notes.append(
            f"Of the {files.height} files {thinned.height} are drawn in the second plot: the {_SLOWEST_KEPT} that "
            "took longest, and a regular sample of the others. The tables count all."
        )
    plots = [_sizes(stats, files), _times(stats, thinned)]
    return Content(plots, [_kinds_table(stats, files), _slowest_table(stats, files)], notes)


def _warnings(run: RunData, stats: OperationStats, files: pl.DataFrame) -> list[str]:
    total = int(files["bytes"].sum())
    notes = [f"{title_of(stats)}: {plural(files.height, 'file')}, {size(total)}."]
    per_rank = files.group_by("rank").agg(pl.col("bytes").sum()).sort("bytes", "rank", descending=[True, False])
    most_rank, most = per_rank.row(0)
    mean = total / stats.ranks
    if mean and most > _SKEW * mean:
        notes.append(
            f"Skew: rank {most_rank} moves {size(most)}, {most / mean:.1f} times the mean of the {stats.ranks} ranks; "
            "the operation takes as long as its busiest rank."
        )
    return notes


def _sizes(stats: OperationStats, files: pl.DataFrame) -> Plot:
    """How many files of each kind have which size, in steps of 1, 2, 5, 10, ..."""
    num_bytes = pl.col("bytes").clip(lower_bound=1)
    decade = num_bytes.log10().floor()
    lead = num_bytes / pl.lit(10.0).pow(decade)
    step = 3 * decade + pl.when(lead < 2).then(0).when(lead < 5).then(1).otherwise(2)
    counts = files.with_columns(step.cast(pl.Int64).alias("step")).group_by("kind", "step").len()
    steps = range(min(counts["step"]), max(counts["step"]) + 1)
    labels = [f"{_edge(step)}<br>to {_edge(step + 1)}" for step in steps]
    data: list[dict[str, Any]] = []
    for kind, _, paint, _ in _KINDS:
        mine = dict(counts.filter(pl.col("kind") == kind).select("step", "len").iter_rows())
        if mine:
            marker = {"color": paint, "line": {"width": 0.5, "color": NEUTRAL}}
            y = [mine.get(step, 0) for step in steps]
            data.append(columns(kind, paint, x=labels, y=y, marker=marker, showlegend=True))
    xaxis = {"type": "category", "tickangle": 0}
    arranged = layout(320, x="size of the file", y="files", barmode="stack", xaxis=xaxis)
    description = f"Histogram of the sizes of {files.height} files of {title_of(stats)}, by kind."
    return plot(f"{title_of(stats)}: sizes", data, arranged, description)


def _edge(step: int) -> str:
    """The size at which a step of the histogram begins: 1, 2 or 5 times a power of ten."""
    return size((1, 2, 5)[step % 3] * 10 ** (step // 3)).replace(".0 ", " ")


def _thinned(files: pl.DataFrame) -> pl.DataFrame:
    """At most _MOST_POINTS files: the slowest all, of the others every n-th. `files` is sorted by time."""
    if files.height <= _MOST_POINTS:
        return files
    rest = files.slice(_SLOWEST_KEPT)
    sample = rest.gather_every(math.ceil(rest.height / (_MOST_POINTS - _SLOWEST_KEPT)))
    return pl.concat([files.head(_SLOWEST_KEPT), sample])


def _times(stats: OperationStats, files: pl.DataFrame) -> Plot:
    data: list[dict[str, Any]] = []
    for kind, _, paint, symbol in _KINDS:
        mine = files.filter(pl.col("kind") == kind)
        if mine.is_empty():
            continue
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": kind,
                "x": mine["bytes"].to_list(),
                "y": [round(value, 6) for value in mine["took_s"]],
                "text": [f"rank {rank}: {file}" for rank, file in mine.select("rank", "file").iter_rows()],
                "marker": {"color": paint, "symbol": symbol, "size": 8, "opacity": 0.8},
                "showlegend": True,
                "hovertemplate": "%{text}<br>%{x:.4s}B in %{y:.4f} s<extra></extra>",
            }
        )
    # A file without bytes or time has no place on a logarithmic axis; the tables have it.
    arranged = layout(
        380,
        x="bytes of the file",
        y="write and fsync, s" if stats.operation == "save" else "read and decode, s",
        xaxis={"type": "log", "dtick": "D2", "tickformat": "~s"},
        yaxis={"type": "log", "dtick": "D2", "tickformat": "~g"},
    )
    description = f"Time against size of {files.height} files of {title_of(stats)}, both on logarithmic axes."
    return plot(f"{title_of(stats)}: time of each file", data, arranged, description)


_KIND_COLUMNS: tuple[Column[dict[str, Any]], ...] = (
    Column("kind", lambda row: row["kind"]),
    numbers("files", lambda row: row["files"]),
    *(numbers(name, lambda row, name=name: row[name], size) for name in ("bytes", "smallest")),
    numbers("median", lambda row: row["median"], lambda value: size(int(value))),
    numbers("largest", lambda row: row["largest"], size),
    times("median s", lambda row: row["median_s"]),
    times("slowest s", lambda row: row["took_s"]),
    numbers("median GB/s", lambda row: row["GBps"], rate),
)


def _kinds_table(stats: OperationStats, files: pl.DataFrame) -> Table:
    speed = (pl.col("bytes") / 1e9 / pl.when(pl.col("took_s") > 0).then(pl.col("took_s"))).median()
    kinds = (
        files.group_by("kind")
        .agg(
            pl.len().alias("files"),
            pl.col("bytes").sum(),
            pl.col("bytes").min().alias("smallest"),
            pl.col("bytes").median().alias("median"),
            pl.col("bytes").max().alias("largest"),
            pl.col("took_s").median().alias("median_s"),
            pl.col("took_s").max(),
            speed.alias("GBps"),
        )
        .sort("bytes", "kind", descending=[True, False])
    )
    return table(f"{title_of(stats)}: files by kind", _KIND_COLUMNS, kinds.iter_rows(named=True))


def _slowest_table(stats: OperationStats, files: pl.DataFrame) -> Table:
    def fsync_text(row: dict[str, Any]) -> str:
        return seconds(row["fsync_s"], 4) if stats.operation == "save" else NOT_RECORDED

    def speed(row: dict[str, Any]) -> float | None:
        return row["bytes"] / 1e9 / row["took_s"] if row["took_s"] and row["bytes"] else None

    columns: list[Column[dict[str, Any]]] = [
        Column("file", lambda row: row["file"]),
        numbers("rank", lambda row: row["rank"]),
        numbers("bytes", lambda row: row["bytes"], size),
        times("took s", lambda row: row["took_s"]),
        Column("of it fsync s", fsync_text, lambda row: row["fsync_s"]),
        numbers("GB/s", speed, rate),
    ]
    slowest = files.head(_SLOWEST_NAMED)
    caption = f"{title_of(stats)}: the {slowest.height} files that took longest"
    return table(caption, columns, slowest.iter_rows(named=True), folded=True)
