"""Frames for users: each row names its run and rank. `TraceAnalysis` lists the columns."""

from __future__ import annotations

import polars as pl

from ..ingest.load import Trace
from .frame import Frames

_OPERATION = ("cycle", "rank", "group", "operation", "op_id")
_LABELS = {"tag": pl.Categorical, "step": pl.Int64, "engine": pl.Categorical}
_TIMES = ("start_ns", "end_ns", "duration_ns")
_SPAN = ("phase", "detail", "file", "bytes", *_TIMES, "thread", "blocking", "error")


def with_places(rows: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    """Rows that have `cycle` and `rank`, with the columns run_id, cycle, rank, tp, pp, dp and host in front."""
    place = ["run_id", "cycle", "rank", "tp", "pp", "dp", "host"]
    rows = rows.with_columns(pl.lit(trace.run_id).alias("run_id"))
    places = _places(trace)
    if "host" in rows.columns:  # of events: each node's supervisor tells of its own, and all have rank -1
        places, rows = places.drop("host"), rows.cast({"host": pl.Categorical})
    joined = rows.join(places, on=["cycle", "rank"], how="left", maintain_order="left")
    return joined.select(*place, pl.exclude(place))


def _places(trace: Trace) -> pl.DataFrame:
    """Coordinates and host of each rank in each cycle. Supervisors are rank -1, and tell of later cycles, too."""
    names = ("cycle", "rank", "tp", "pp", "dp", "host")
    rows = {(p["cycle"], p["rank"]): tuple(p[name] for name in names) for p in trace.ranks}
    supervisors = sorted(trace.supervisors, key=lambda p: p["cycle"])
    for cycle in {p["cycle"] for p in [*trace.supervisors, *trace.ranks]}:
        began = [p for p in supervisors if p["cycle"] <= cycle]
        for p in began[-1:]:
            rows[cycle, p["rank"]] = (cycle, *(p[name] for name in names[1:]))
    schema = {name: pl.Int64 for name in names[:-1]} | {"host": pl.Categorical}
    return pl.DataFrame(list(rows.values()), schema=schema, orient="row")


def labelled_spans(frames: Frames) -> pl.DataFrame:
    """All spans, each with the cycle, rank, tag, step and engine of its operation."""
    op = frames.spans["op"]
    labels = [frames.operations[name].cast(kind).gather(op) for name, kind in _LABELS.items()]
    return frames.spans_of().with_columns(labels).select(*_OPERATION, *_LABELS, *_SPAN)


def of_operations(rows: pl.DataFrame, frames: Frames) -> pl.DataFrame:
    """Rows that have `group` and `rank`, each with the cycle, tag and step of its operation."""
    labels = frames.operations.select("group", "rank", "cycle", "tag", "step")
    key = ["cycle", "rank", "group", "operation", "tag", "step"]
    return rows.join(labels, on=["group", "rank"], how="left").select(*key, pl.exclude(key)).sort("group", "rank")
