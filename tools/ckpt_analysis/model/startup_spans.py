"""Spans of start-ups with the load inside them, by phase and by detail.

A start-up contains the load. It is shown as the phase "load": the wall time of the load operation, with the load's own
phases as details. A start-up phase that surrounds the load excludes it, so the phases add up.
"""

from __future__ import annotations

import polars as pl

from ..common.names import NAME
from .frame import Frames

_PLACE = ["cycle", "rank"]
_COLUMNS = [
    "group", "cycle", "rank", "phase", "detail", "file", "bytes", "start_ns", "end_ns", "duration_ns",
    "blocking", "operation_start_ns", "operation_end_ns",
]  # fmt: skip


def startup_spans(frames: Frames) -> tuple[pl.DataFrame, pl.DataFrame]:
    """(spans to sum per phase, spans of the loads within) of all start-ups; both have its group and window."""
    loads = frames.startup_loads
    window = frames.startups.select(
        *_PLACE,
        pl.col("group"),
        pl.col("start_ns").alias("operation_start_ns"),
        pl.col("end_ns").alias("operation_end_ns"),
    )
    own = (
        # What was done in the background delayed nothing: a wait for it has a span of its own.
        frames.spans_of(pl.col("operation") == "startup", pl.col("blocking"))
        .drop("group", "operation_start_ns", "operation_end_ns")
        .join(window, on=_PLACE, how="inner")
    )
    as_phase = (
        loads.select(*_PLACE, "bytes", "start_ns", "end_ns")
        .join(window, on=_PLACE, how="inner")
        .with_columns(
            pl.lit("load", NAME).alias("phase"),
            pl.lit(None, NAME).alias("detail"),
            pl.lit(None, pl.Categorical).alias("file"),
            (pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"),
            pl.lit(True).alias("blocking"),
        )
    )
    of_loads = (
        # What was read ahead, before the load, delayed nothing.
        frames.spans_of(pl.col("operation") == "load", pl.col("blocking"))
        .drop("group", "operation_start_ns", "operation_end_ns")
        .join(loads.select(*_PLACE, "op_id"), on=[*_PLACE, "op_id"], how="semi")
        .join(window, on=_PLACE, how="inner")
    )
    phase_spans = pl.concat([_without(own, as_phase).select(_COLUMNS), as_phase.select(_COLUMNS)])
    return phase_spans, of_loads.select(_COLUMNS)


def as_details(of_loads: pl.DataFrame) -> pl.DataFrame:
    """Spans of loads as those of the phase "load" of their start-up, with the load's phases as its details."""
    return of_loads.with_columns(pl.col("phase").alias("detail"), pl.lit("load", NAME).alias("phase"))


def _without(spans: pl.DataFrame, loads: pl.DataFrame) -> pl.DataFrame:
    """Take the time of the loads out of the durations of the spans around them."""
    numbered = spans.with_row_index("row")
    other = loads.select(*_PLACE, pl.col("start_ns").alias("load_start"), pl.col("end_ns").alias("load_end"))
    overlap = (pl.min_horizontal("end_ns", "load_end") - pl.max_horizontal("start_ns", "load_start")).clip(
        lower_bound=0
    )
    taken = numbered.join(other, on=_PLACE, how="inner").group_by("row").agg(overlap.sum().alias("taken_ns"))
    reduced = (pl.col("duration_ns") - pl.col("taken_ns").fill_null(0)).clip(lower_bound=0)
    return (
        numbered.join(taken, on="row", how="left", maintain_order="left")
        .with_columns(reduced.alias("duration_ns"))
        .drop("row", "taken_ns")
    )
