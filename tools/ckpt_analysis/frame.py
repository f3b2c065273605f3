"""Records to tidy frames: one row per operation and rank, per span, per iteration, per event.

The n-th save of a tag on each rank is one save of the run, and so for the n-th load: `group` numbers them.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from megatron.restart_trace.schema import PHASES
from tools.ckpt_analysis.load import Trace

# Names of phases and details as one small type: grouping and sorting millions of spans by text is slow.
NAME = pl.Enum(
    sorted({"", *(n for ps in PHASES.values() for p, details in ps.items() for n in (p, *details))})
)

_OPERATION_RECORDS = ("operation_begin", "span", "operation_end")
_OPERATION_KEY = ["cycle", "rank", "op_id"]


@dataclass(frozen=True)
class Frames:
    """Tidy frames of one run; times are Unix ns.

    operations  group, operation, cycle, rank, op_id, tag, step, engine, start_ns, end_ns, outcome, bytes,
                num_files, durable, error; end_ns is null and outcome "unfinished" without a closing record
    spans       group, operation, cycle, rank, phase, detail, file, bytes, start_ns, end_ns, duration_ns,
                blocking, error, operation_start_ns, operation_end_ns
    iterations  cycle, rank, step, start_ns, end_ns, loss
    events      cycle, rank, operation, phase, detail, step, time_ns
    runtimes    cycle, rank and the fields of the runtime record
    """

    operations: pl.DataFrame
    spans: pl.DataFrame
    iterations: pl.DataFrame
    events: pl.DataFrame
    runtimes: pl.DataFrame


def make_frames(trace: Trace) -> Frames:
    """Sort the records of a trace into frames."""
    records = trace.records
    operations = _operations(records)
    window = operations.select(
        *_OPERATION_KEY,
        "group",
        pl.col("start_ns").alias("operation_start_ns"),
        pl.col("end_ns").alias("operation_end_ns"),
    )
    spans = (
        records.filter(pl.col("type") == "span")
        .select(
            *_OPERATION_KEY, "operation", pl.col("phase", "detail").cast(NAME), "file", "bytes", "start_ns",
            "end_ns", "duration_ns", "blocking", "error",
        )
        .join(window, on=_OPERATION_KEY, how="inner", maintain_order="left")
    )  # fmt: skip
    return Frames(
        operations=operations,
        spans=spans,
        iterations=records.filter(pl.col("type") == "iteration").select(
            "cycle", "rank", "step", "start_ns", "end_ns", "loss"
        ),
        events=records.filter(pl.col("type") == "event").select(
            "cycle", "rank", "operation", "phase", "detail", "step", "time_ns"
        ),
        runtimes=records.filter(pl.col("type") == "runtime").select(
            "cycle", "rank", "engine_used", "engine_asked", "optimizer", "accelerator", "backend",
            "parameters", "save_dir",
        ),
    )  # fmt: skip


def _operations(records: pl.DataFrame) -> pl.DataFrame:
    """One row per operation and rank, out of whichever of its records there are."""
    is_begin = pl.col("type") == "operation_begin"
    is_end = pl.col("type") == "operation_end"

    def of_end(name: str) -> pl.Expr:
        return pl.col(name).filter(is_end).first()

    def latest(name: str) -> pl.Expr:  # a load learns its tag after its begin
        return pl.col(name).drop_nulls().last()

    operations = (
        records.filter(pl.col("type").is_in(_OPERATION_RECORDS))
        .group_by(_OPERATION_KEY)
        .agg(
            pl.col("operation").first(),
            latest("tag"),
            latest("step"),
            latest("engine"),
            pl.coalesce(
                pl.col("start_ns").filter(is_begin).first(), of_end("start_ns"), pl.col("start_ns").min()
            ).alias("start_ns"),
            of_end("end_ns"),
            of_end("outcome").fill_null("unfinished"),
            of_end("bytes"),
            of_end("num_files"),
            of_end("durable"),
            of_end("error"),
        )
        .sort(_OPERATION_KEY)
    )
    # All attempts of a load belong together, whatever tag each rank ended with.
    key = pl.when(pl.col("operation") == "save").then(pl.col("tag")).fill_null("").alias("key")
    operations = operations.with_columns(key)
    occurrence = pl.int_range(pl.len()).over("cycle", "rank", "operation", "key").alias("occurrence")
    group = ["cycle", "operation", "key", "occurrence"]
    operations = operations.with_columns(occurrence)
    groups = (
        operations.group_by(group)
        .agg(pl.col("start_ns").min().alias("first_ns"))
        .sort("cycle", "first_ns", "operation", "key", "occurrence")
        .with_row_index("group")
    )
    return operations.join(groups, on=group, how="left", maintain_order="left").drop(
        "key", "occurrence", "first_ns"
    )
