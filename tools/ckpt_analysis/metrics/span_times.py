"""Times and volumes of the spans of saves and loads, for each operation of each rank.

They depend on the file of that rank only, so the process that reads a batch of files computes them. They use
differences of times only, so clocks need not be aligned.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from ..ingest.groups import with_group
from ..ingest.records import Records
from .phases import phase_seconds
from .rank_totals import own_time, rank_busy
from .volumes import VolumeParts, volume_parts

MEASURED = ("save", "load")
_WINDOW = [pl.col("start_ns").alias("operation_start_ns"), pl.col("end_ns").alias("operation_end_ns")]


@dataclass(frozen=True)
class SpanTimes:
    """Of the saves and loads of some files, in ns; `op` is the row of an operation in their table.

    seconds  op, phase, detail ("": the phase as a whole), busy_ns
    totals   op, blocked_ns, drained_ns, covered_ns, own_ns
    volumes  whose `group` is an op: the first of those files that is of the same operation of the run
    """

    seconds: pl.DataFrame
    totals: pl.DataFrame
    volumes: VolumeParts


def span_times(records: Records) -> SpanTimes:
    """Of files of one run."""
    return times_of_piece(with_group(records.operations), records.spans)


def times_of_piece(operations: pl.DataFrame, spans: pl.DataFrame) -> SpanTimes:
    """Of spans that are sorted by `op`, all of each operation that is among them. `operations` have `group`."""
    is_measured = operations["operation"].cast(pl.String).is_in(MEASURED)
    if not is_measured.all():
        spans = spans.filter(is_measured.gather(spans["op"]))
    seconds = phase_seconds(spans, spans.filter(pl.col("detail").is_not_null()), of=["op"])
    totals = rank_busy(spans.hstack(operations.select(_WINDOW)[spans["op"]]), of=["op"])
    totals = totals.join(own_time(seconds, ["op"]), on="op", how="left")
    first = operations.with_row_index("op").select(pl.col("op").first().over("group").alias("group"), "rank")
    return SpanTimes(seconds, totals, volume_parts(spans.hstack(first[spans["op"]])))
