"""Turns records into frames: one row per operation and rank, span, iteration, event, probe.

`group` numbers the operations of the run; each is one operation on every rank (ingest/groups.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import polars as pl

from ..common.names import FILE, OPERATION
from ..ingest.load import Trace
from ..ingest.records import Records, no_records

_FROM_OPERATION = ["group", "operation", "cycle", "rank", "op_id"]


@dataclass(frozen=True)
class Frames:
    """Tidy frames of one run; times are Unix ns.

    operations  group, operation, cycle, rank, op_id, tag, step, engine, inferred, weights_only, said_ranks, tier,
                start_ns, end_ns, outcome, bytes, num_files, durable, error; end_ns is null and outcome "unfinished"
                without a closing record
    spans       op, phase, detail, file, bytes, start_ns, end_ns, duration_ns, thread, blocking, error; op is the
                row in `operations`, and the spans are sorted by it and by start_ns. Those of a large run take more
                memory than all else: what they share with their operation is added by `spans_of` and `placed`
    iterations  cycle, rank, step, start_ns, end_ns, loss
    events      cycle, rank, operation, phase, detail, step, time_ns, host
    runtimes    cycle, rank and the fields of the runtime record
    probes      cycle, rank, operation, op_id, at, time_ns, values (JSON text)
    samples     cycle, rank, time_ns, values (JSON text)
    """

    operations: pl.DataFrame
    spans: pl.DataFrame
    iterations: pl.DataFrame
    events: pl.DataFrame
    runtimes: pl.DataFrame
    probes: pl.DataFrame
    samples: pl.DataFrame

    def spans_of(self, which: pl.Expr | None = None, what: pl.Expr | None = None) -> pl.DataFrame:
        """Spans that match `what`, of the operations that match `which`, as `placed` gives them; None: all."""
        conditions: list[pl.Series | pl.Expr] = [] if what is None else [what]
        if which is not None:
            mine = self.operations.select(which.fill_null(False)).to_series()
            conditions.append(mine.gather(self.spans["op"]))
        return self.placed(self.spans.filter(*conditions) if conditions else self.spans)

    def placed(self, rows: pl.DataFrame, *names: str) -> pl.DataFrame:
        """Rows that have `op`, such as spans, with what their operations say.

        Those are the columns `names` of group, operation, cycle, rank, op_id, operation_start_ns and operation_end_ns;
        all of them if none is named.
        """
        places = self._places
        return rows.hstack((places[list(names)] if names else places)[rows["op"]])

    @cached_property
    def _places(self) -> pl.DataFrame:
        """What `placed` adds, of each operation."""
        window = pl.col("start_ns", "end_ns").name.prefix("operation_")
        return self.operations.with_columns(pl.col("operation").cast(OPERATION)).select(*_FROM_OPERATION, window)

    @cached_property
    def startups(self) -> pl.DataFrame:
        """Start-up operations whose end_ns is the end of their `first_step` span; null if that is missing."""
        place = ["cycle", "rank"]
        first_steps = self.spans_of(pl.col("operation") == "startup", pl.col("phase") == "first_step")
        ends = first_steps.group_by(place).agg(pl.col("end_ns").max())
        startups = self.operations.filter(pl.col("operation") == "startup").drop("end_ns")
        return startups.join(ends, on=place, how="left", maintain_order="left")

    @cached_property
    def startup_loads(self) -> pl.DataFrame:
        """Load operations that began within the start-up of their process: rows of `operations` plus `startup`.

        `startup` is the group of the start-up. The end_ns of an unfinished load is that of its last span.
        """
        place = ["cycle", "rank"]
        windows = self.startups.select(*place, startup="group", from_ns="start_ns", to_ns="end_ns")
        loads = self.operations.filter(pl.col("operation") == "load").join(windows, on=place, how="inner")
        before_its_end = pl.col("to_ns").is_null() | (pl.col("start_ns") < pl.col("to_ns"))
        inside = loads.filter((pl.col("start_ns") >= pl.col("from_ns")) & before_its_end)
        spans = self.spans_of(pl.col("operation") == "load")
        last = spans.group_by("group", "rank").agg(last_ns=pl.col("end_ns").max())
        end_ns = pl.coalesce("end_ns", "last_ns", "start_ns").alias("end_ns")
        return inside.join(last, on=["group", "rank"], how="left").with_columns(end_ns)


def make_frames(trace: Trace) -> Frames:
    """The records of a trace as frames."""
    return _frames(trace.records)


def no_frames() -> Frames:
    """The frames of a run of which nothing is known rank by rank: without rows."""
    records = no_records()
    operations = records.operations.with_columns(pl.lit(0, pl.UInt32).alias("group"))
    events = records.events.with_columns(pl.lit(None, pl.String).alias("host"))
    return _frames(replace(records, operations=operations, events=events))


def _frames(records: Records) -> Frames:
    operations = _without_origin(records.operations).select("group", pl.exclude("group"))
    return Frames(
        operations=operations.with_columns(pl.col("operation").cast(pl.String)),
        spans=records.spans,
        iterations=_without_origin(records.iterations),
        events=_without_origin(records.events),
        runtimes=_without_origin(records.runtimes),
        probes=_without_origin(records.probes),
        samples=_without_origin(records.samples),
    )


def _without_origin(table: pl.DataFrame) -> pl.DataFrame:
    return table.drop(FILE)
