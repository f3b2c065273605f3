"""Figure 9: memory, page cache, I/O counters and device over the operations of a run; throughput over one save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from ....common.formatting import size
from ....common.tables import Column
from ...model.probe_values import NAMES
from ...model.sample_rates import NAMES as RATES
from ...model.sample_rates import never_above_zero, rates_over
from ..content import Content, Plot, Table, missing, plot, table
from .colours import SERIES
from .plots import columns, layout, line, vertical
from .run_data import RunData, title_of, wall_of

_MOST_MOMENTS = 400
_MOST_SAMPLES = 1000
_MOST_TICKS = 8


@dataclass(frozen=True)
class _Panel:
    """One plot: `names` of probes with a common unit, and what they are divided by for it."""

    title: str
    axis: str
    scale: float
    names: tuple[str, ...]


_OF_DEVICE = ("device_allocated_bytes", "device_reserved_bytes", "device_peak_allocated_bytes", "gpu_memory_used_bytes")
_LEVELS = (
    _Panel("Memory of a process", "GB, highest rank", 1e9, ("rss_bytes",)),
    _Panel("Memory of a device", "GB, highest rank", 1e9, _OF_DEVICE),
    _Panel("Page cache of a host", "GB, highest rank", 1e9, ("page_cache_bytes", "dirty_bytes", "writeback_bytes")),
    _Panel("Device in use", "%, highest rank", 1.0, ("gpu_utilization_percent",)),
)
_COUNTERS = {
    "io_read_calls_bytes": "read by calls",
    "io_write_calls_bytes": "written by calls",
    "io_read_storage_bytes": "fetched from storage",
    "io_write_storage_bytes": "sent to storage",
}


def draw(run: RunData) -> Content:
    """Throughput over a save; levels at the ends of operations, and what the I/O counters rose by in each."""
    probes = run.probes
    known = [name for name in NAMES if probes[name].count()]
    if not known:
        return missing(
            "No probes were recorded: the run was traced with --restart-trace-probes off, or by a tool that has none."
        )
    moments = _moments(run)
    plots = [_levels(panel, moments, known) for panel in _LEVELS if set(panel.names) & set(known)]
    if set(_COUNTERS) & set(known):
        plots.append(_traffic(run, known))
    absent = [panel.title for panel in _LEVELS if not set(panel.names) & set(known)]
    notes = [f"Not recorded (no such device, or hidden there): {', '.join(absent)}."] if absent else []
    zero = never_above_zero(run.frames)
    if zero:
        notes.append(f"Not observed, since it is 0 in every sample of the run: {', '.join(zero)}.")
    if moments.height > _MOST_MOMENTS:
        notes.append(f"The plots show the last {_MOST_MOMENTS} moments; the table is over all.")
    over_save = _over_save(run)
    if over_save is not None:
        plots.insert(0, over_save[0])
    tables = [_table(probes, known), *([] if over_save is None else [over_save[1]])]
    return Content(plots, tables, notes)


def _over_save(run: RunData) -> tuple[Plot, Table] | None:
    """Throughput on the critical rank while the save that is shown ran, and a table over all ranks."""
    if run.save is None or run.frames.samples.is_empty():
        return None
    rates = rates_over(run.frames, run.save.group)
    known = [name for name in RATES if rates[name].drop_nulls().len()]
    critical = run.save.critical_rank
    mine = rates.filter(pl.col("rank") == critical)
    if not known or mine.is_empty():
        return None
    every = -(-mine.height // _MOST_SAMPLES)
    shown = mine.with_row_index("row").group_by(pl.col("row") // every, maintain_order=True).agg(pl.all().max())
    data = [
        line(name, paint, x=shown["seconds"].to_list(), y=(shown[name] / 1e9).to_list(), showlegend=True)
        for name, paint in zip(known, SERIES, strict=False)
    ]
    end = wall_of(run.save).at_critical_s or wall_of(run.save).max_s
    shapes = [vertical(x, line={"dash": "dot", "width": 1}) for x in (0.0, end)]
    arranged = layout(320, x="s since the save began", y="GB/s", shapes=shapes)
    title = f"Throughput over {title_of(run.save)}, critical rank {critical}"
    description = f"Lines of {', '.join(known)} in {shown.height} samples; dotted: the save's start and end."
    rows = [_rate_of(rates, name) for name in known]
    caption = f"Throughput over {title_of(run.save)}, all ranks"
    return plot(title, data, arranged, description), table(caption, _RATE_COLUMNS, rows)


def _labels(run: RunData) -> pl.DataFrame:
    """group, label, order of the operations that were probed."""
    operation, tag = pl.col("operation").first().cast(pl.String), pl.col("tag").drop_nulls().first()
    cycle = pl.concat_str(pl.lit("cycle "), pl.col("cycle").first())
    label = pl.concat_str(operation, tag, cycle, separator="<br>", ignore_nulls=True)
    return run.frames.operations.group_by("group").agg(label=label, order=pl.col("start_ns").min())


def _moments(run: RunData) -> pl.DataFrame:
    """Highest value over the ranks of every probe, at the start and end of each operation, in order of time."""
    return (
        run.probes.group_by("group", "at")
        .agg(pl.col(name).max() for name in NAMES)
        .join(_labels(run), on="group")
        .sort("order", "group", pl.col("at") == "end")
        .with_columns(pl.concat_str("label", pl.lit("<br>"), "at").alias("label"))
    )


def _levels(panel: _Panel, moments: pl.DataFrame, known: list[str]) -> Plot:
    shown = moments.tail(_MOST_MOMENTS)
    labels = shown["label"].to_list()
    x = list(range(len(labels)))
    names = [name for name in panel.names if name in known]
    data = []
    for name, paint in zip(names, SERIES, strict=False):
        y = (shown[name] / panel.scale).to_list()
        look = {"text": labels, "hovertemplate": f"%{{text}}<br>{name}: %{{y:.4g}}<extra></extra>"}
        data.append(line(name, paint, x=x, y=y, showlegend=True, **look))
    arranged = layout(300, x="", y=panel.axis, xaxis=_ticks(labels), yaxis={"rangemode": "tozero"})
    description = f"Lines of {', '.join(names)} at the ends of {len(x) // 2} operations."
    return plot(panel.title, data, arranged, description)


def _traffic(run: RunData, known: list[str]) -> Plot:
    """Rise of the process's I/O counters in each operation, summed over the ranks with both samples."""
    names = [name for name in _COUNTERS if name in known]
    rises = (
        run.probes.group_by("group", "rank")
        .agg(pl.len().alias("samples"), *((pl.col(name).max() - pl.col(name).min()) for name in names))
        .filter(pl.col("samples") == 2)
        .group_by("group")
        .agg(pl.col(name).sum() for name in names)
        .join(_labels(run), on="group")
        .sort("order")
        .tail(_MOST_MOMENTS // 2)
    )
    labels = rises["label"].to_list()
    x = list(range(len(labels)))
    data = [
        columns(
            _COUNTERS[name],
            paint,
            x=x,
            y=(rises[name] / 1e9).to_list(),
            text=labels,
            textposition="none",
            hovertemplate=f"%{{text}}<br>{_COUNTERS[name]}: %{{y:.4g}} GB<extra></extra>",
        )
        for name, paint in zip(names, SERIES, strict=False)
    ]
    arranged = layout(320, x="", y="GB, all ranks", barmode="group", xaxis=_ticks(labels))
    description = f"Bars of the bytes that all ranks read and wrote in each of {len(labels)} operations."
    return plot("I/O of the processes in each operation", data, arranged, description)


def _ticks(labels: list[str]) -> dict[str, Any]:
    """An axis of operations, of which every n-th is labelled."""
    every = -(-len(labels) // _MOST_TICKS) or 1
    shown = list(range(len(labels)))[::every]
    return {"tickmode": "array", "tickvals": shown, "ticktext": labels[::every], "tickangle": 0}


class _Rate(NamedTuple):
    name: str
    mean: float  # B/s; of the ranks' means
    highest: float
    rank: int  # with the highest

    def show(self, value: float) -> str:
        return f"{value / 1e9:.3g}"


_RATE_COLUMNS: tuple[Column[_Rate], ...] = (
    Column("throughput", lambda rate: rate.name),
    Column("mean of the ranks, GB/s", lambda rate: rate.show(rate.mean), lambda rate: rate.mean),
    Column("highest sample, GB/s", lambda rate: rate.show(rate.highest), lambda rate: rate.highest),
    Column("on rank", lambda rate: str(rate.rank)),
)


def _rate_of(rates: pl.DataFrame, name: str) -> _Rate:
    values = rates.select("rank", pl.col(name).alias("rate")).drop_nulls()
    highest = values.sort("rate", "rank", descending=[True, False]).row(0)
    means = values.group_by("rank").agg(pl.col("rate").mean())["rate"].to_list()
    return _Rate(name, sum(means) / len(means), highest[1], highest[0])


class _Probe(NamedTuple):
    name: str
    lowest: float
    median: float
    highest: float
    rank: int  # with the highest

    def show(self, value: float) -> str:
        return size(int(value)) if "bytes" in self.name else f"{value:.0f}"


def _level(title: str, value: Callable[[_Probe], float]) -> Column[_Probe]:
    return Column(title, lambda probe: probe.show(value(probe)), value)


_COLUMNS: tuple[Column[_Probe], ...] = (
    Column("probe", lambda probe: probe.name),
    _level("lowest", lambda probe: probe.lowest),
    _level("median", lambda probe: probe.median),
    _level("highest", lambda probe: probe.highest),
    Column("on rank", lambda probe: str(probe.rank)),
)


def _table(probes: pl.DataFrame, known: list[str]) -> Table:
    rows = []
    for name in known:
        values = probes.select("rank", name).drop_nulls().sort(name, "rank", descending=[True, False])
        levels = (values[name].min(), values[name].median(), values[name].max())
        rows.append(_Probe(name, *(float(str(level)) for level in levels), rank=values["rank"][0]))
    return table("Probes over all ranks and operations", _COLUMNS, rows)
