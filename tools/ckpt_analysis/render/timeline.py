"""Spans as Chrome trace events, written piece by piece.

The format is that of "Trace Event Format" (Google, 2016), as Perfetto reads it: a process per rank, a track per
thread, complete events ("X") in microseconds. Times are relative to the first event.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TextIO

import polars as pl

from ..common.intervals import pieces
from ..ingest.load import Trace
from ..model.frame import Frames

_MAIN = "MainThread"
_ITERATIONS = "iterations"  # a track of its own: an asynchronous save lies across them


@dataclass(frozen=True)
class Cut:
    """What to show; None is everything. `ranks` are ranges, both ends included."""

    ranks: list[tuple[int, int]] | None = None
    checkpoint: str | None = None
    cycle: int | None = None

    def __str__(self) -> str:
        asked = (
            ("--ranks", self.ranks and ",".join(f"{a}-{b}" for a, b in self.ranks)),
            ("--checkpoint", self.checkpoint),
            ("--cycle", self.cycle),
        )
        return " ".join(f"{flag} {value}" for flag, value in asked if value is not None) or "any kind"


def cut(frames: Frames, asked: Cut) -> Frames:
    """The frames with what was asked for. A checkpoint brings the iterations that overlap its operations."""
    keep = pl.lit(True)
    if asked.cycle is not None:
        keep &= pl.col("cycle") == asked.cycle
    if asked.ranks is not None:
        ranges = [pl.col("rank").is_between(first, last) for first, last in asked.ranks]
        keep &= pl.any_horizontal(ranges)
    operations = frames.operations.with_row_index("op").filter(keep)
    iterations, events = frames.iterations.filter(keep), frames.events.filter(keep)
    if asked.checkpoint is not None:
        of_step = pl.col("step").cast(pl.String) == asked.checkpoint.removeprefix("global_step")
        named = ((pl.col("tag") == asked.checkpoint) | of_step).fill_null(False)
        operations = operations.filter((pl.col("operation") != "startup") & named)
        first, last = operations.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
        overlap = (pl.col("start_ns") < pl.lit(last, pl.Int64)) & (pl.col("end_ns") > pl.lit(first, pl.Int64))
        iterations = iterations.filter(overlap)
        events = events.clear()
    rows = operations.select("op", pl.int_range(pl.len(), dtype=pl.UInt32).alias("row"))
    spans = frames.spans.join(rows, on="op", how="inner", maintain_order="left")
    spans = spans.with_columns(pl.col("row").alias("op")).drop("row")
    return replace(frames, operations=operations.drop("op"), spans=spans, iterations=iterations, events=events)


def write_timeline(
    stream: TextIO, trace: Trace, frames: Frames, advance: Callable[[int], object] = lambda spans: None
) -> int:
    """Write the frames as one JSON object; returns the number of events, without those that name tracks."""
    times = (frames.spans["start_ns"], frames.operations["start_ns"], frames.iterations["start_ns"])
    starts = [column.min() for column in (*times, frames.events["time_ns"])]
    zero = min(start for start in starts if isinstance(start, int))
    tracks = _tracks(frames)
    stream.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    stream.write(",\n".join(_names(trace, frames, tracks)))
    written = 0
    for piece in pieces(frames.spans):
        written += _write(stream, _span_events(frames.placed(piece), frames.operations, tracks, zero))
        advance(piece.height)
    written += _write(stream, _operation_events(frames.operations, zero))
    written += _write(stream, _iteration_events(frames.iterations, tracks[_ITERATIONS], zero))
    written += _write(stream, _instants(frames.events, zero))
    stream.write("\n]}\n")
    return written


def _write(stream: TextIO, events: pl.Series) -> int:
    stream.writelines(f",\n{event}" for event in events)
    return len(events)


def _tracks(frames: Frames) -> dict[str, int]:
    """Thread name -> number of its track, the training thread on top."""
    names = frames.spans["thread"].cast(pl.String).unique().sort().to_list()
    first = [_MAIN, _ITERATIONS]
    return {name: index for index, name in enumerate([*first, *(n for n in names if n not in first)])}


def _names(trace: Trace, frames: Frames, tracks: dict[str, int]) -> list[str]:
    """Events that name each rank's process and the tracks that it uses."""
    places = {p["rank"]: p for p in [*trace.supervisors, *trace.ranks]}
    threads = frames.spans.select("op", "thread").unique()
    used = threads.select(frames.operations["rank"].gather(threads["op"]), pl.col("thread").cast(pl.String)).unique()
    named = {(rank, tracks[thread]): thread for rank, thread in used.iter_rows()}
    named |= {(rank, tracks[_ITERATIONS]): _ITERATIONS for rank in frames.iterations["rank"].unique()}
    events = []
    for rank in sorted({rank for rank, _ in named} | set(frames.events["rank"].unique())):
        place = places.get(rank, {"host": "?", "tp": -1, "pp": -1, "dp": -1})
        place_text = f"rank {rank} (tp {place['tp']}, pp {place['pp']}, dp {place['dp']})"
        label = place_text if rank >= 0 else "supervisor"
        events.append(_meta("process_name", rank, 0, {"name": f"{label} on {place['host']}"}))
        events.append(_meta("process_sort_index", rank, 0, {"sort_index": rank}))
    for (rank, track), name in sorted(named.items()):
        events.append(_meta("thread_name", rank, track, {"name": name}))
        events.append(_meta("thread_sort_index", rank, track, {"sort_index": track}))
    return events


def _meta(name: str, rank: int, track: int, arguments: dict[str, object]) -> str:
    return json.dumps({"name": name, "ph": "M", "pid": rank, "tid": track, "args": arguments})


def _span_events(spans: pl.DataFrame, operations: pl.DataFrame, tracks: dict[str, int], zero: int) -> pl.Series:
    """Complete events, whose duration is the window; `busy_ns` is the time spent in the phase."""
    rows = spans.with_columns(operations["tag"].gather(spans["op"]))
    rows = rows.with_columns(_quoted(rows[name]) for name in ("tag", "file", "error"))
    track = pl.col("thread").cast(pl.String).replace_strict(tracks, return_dtype=pl.Int64)
    phase, operation, blocking = (pl.col(name).cast(pl.String) for name in ("phase", "operation", "blocking"))
    name = ['{"name":"', phase, pl.format("/{}", pl.col("detail").cast(pl.String))]
    place = ['","cat":"', operation, '","ph":"X","pid":', pl.col("rank"), ',"tid":', track, *_window(zero)]
    ids = [*_first_argument("cycle"), ',"op_id":', pl.col("op_id"), ',"busy_ns":', pl.col("duration_ns")]
    optional = [_optional(name) for name in ("tag", "file", "bytes", "error")]
    return _joined(rows, *name, *place, *ids, ',"blocking":', blocking, *optional, "}}")


def _operation_events(operations: pl.DataFrame, zero: int) -> pl.Series:
    """A pair of asynchronous events each, since saves may overlap; one without an end has no second."""
    rows = operations.with_columns(_quoted(operations[name]) for name in ("tag", "outcome", "engine"))
    rank = pl.col("rank")
    number = [rank, ".", pl.col("cycle"), ".", pl.col("op_id")]
    identity = ['","cat":"operation","id":"', *number, '","pid":', rank]
    begin = ['{"name":"', pl.col("operation"), *identity, ',"tid":0,"ts":']
    facts = [*_first_argument("outcome"), *(_optional(name) for name in ("tag", "engine", "bytes"))]
    begins = _joined(rows, *begin, _micro(pl.col("start_ns") - zero), ',"ph":"b"', *facts, "}}")
    ended = rows.filter(pl.col("end_ns").is_not_null())
    ends = _joined(ended, *begin, _micro(pl.col("end_ns") - zero), ',"ph":"e"}')
    return pl.concat([begins, ends])


def _iteration_events(iterations: pl.DataFrame, track: int, zero: int) -> pl.Series:
    name = ['{"name":"step ', pl.col("step"), '","cat":"iteration","ph":"X","pid":', pl.col("rank")]
    loss = pl.format(',"loss":{}', pl.col("loss").fill_nan(None))
    return _joined(iterations, *name, f',"tid":{track}', *_window(zero), *_first_argument("cycle"), loss, "}}")


def _instants(events: pl.DataFrame, zero: int) -> pl.Series:
    rows = events.with_columns(_quoted(events[name]) for name in ("phase", "detail"))
    name = ['{"name":', pl.col("phase"), ',"cat":"event","ph":"i","s":"p","pid":', pl.col("rank")]
    time = [',"tid":0,"ts":', _micro(pl.col("time_ns") - zero)]
    return _joined(rows, *name, *time, *_first_argument("cycle"), _optional("detail"), "}}")


def _first_argument(name: str) -> list[str | pl.Expr]:
    return [f',"args":{{"{name}":', pl.col(name)]


def _optional(name: str) -> pl.Expr:
    """An argument that is left out where it is null."""
    return pl.format(f',"{name}":{{}}', name)


def _joined(rows: pl.DataFrame, *parts: str | pl.Expr) -> pl.Series:
    """The parts of each row as one text: strings as they are; a part that is null is left out."""
    columns = [pl.lit(part) if isinstance(part, str) else part for part in parts]
    return rows.select(pl.concat_str(columns, ignore_nulls=True).alias("event")).to_series()


def _window(zero: int) -> list[str | pl.Expr]:
    start, length = pl.col("start_ns") - zero, pl.col("end_ns") - pl.col("start_ns")
    return [',"ts":', _micro(start), ',"dur":', _micro(length)]


def _micro(ns: pl.Expr) -> pl.Expr:
    """Nanoseconds as microseconds with three decimals: exact, as text."""
    return pl.format("{}.{}", ns // 1000, (ns % 1000).cast(pl.String).str.zfill(3))


def _quoted(texts: pl.Series) -> pl.Series:
    """Text as JSON: file names and error messages may hold any character."""
    texts = texts.cast(pl.String)
    if texts.str.contains(r'["\\[:cntrl:]]').any():
        return texts.map_elements(json.dumps, return_dtype=pl.String)
    return pl.select(pl.format('"{}"', texts)).to_series().alias(texts.name)
