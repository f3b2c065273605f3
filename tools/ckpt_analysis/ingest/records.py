"""Turns trace files into tables of valid records, one table per record type, with columns as small as possible.

Most records are spans. A span does not repeat what its operation says: `op` is the row of the operation in its table.
Times are those recorded, on the clock of each host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from typing import Generic, TypeVar

import polars as pl

from restart_trace.schema import MAIN_THREAD, PHASES, SPAN

from ..common.intervals import sorted_by_op
from ..common.names import FILE, LINE, NAME, TYPE_SCHEMAS
from ..common.problems import Problem
from ..common.processes import map_in_processes, processes_for
from .columns import Frames, read_columns
from .discover import TraceFile
from .fallback import read_lines
from .files import FileText, Head, Reading, batches, read_files, version_problems

PROCESSES_FROM_BYTES = 256 << 20  # each process imports polars, which takes as long as reading some 100 MB


@dataclass(frozen=True)
class Records:
    """Valid records; times on the clocks of their hosts.

    operations  one row per operation and rank: file_index, cycle, rank, op_id, operation, tag, step, engine, inferred,
                weights_only, said_ranks, tier, start_ns, end_ns (null: no end), outcome, bytes, num_files, durable,
                error
    spans       op (row of `operations`), phase, detail, file, bytes, start_ns, end_ns, duration_ns, thread,
                blocking, error; sorted by op and start_ns
    iterations  file_index, cycle, rank, step, start_ns, end_ns, loss
    events      file_index, cycle, rank, operation, phase, detail, step, time_ns
    runtimes    file_index, cycle, rank and the fields of the last runtime record
    probes      file_index, cycle, rank, operation, op_id, at, time_ns, values (JSON text)
    samples     file_index, cycle, rank, time_ns, values (JSON text)
    """

    operations: pl.DataFrame
    spans: pl.DataFrame
    iterations: pl.DataFrame
    events: pl.DataFrame
    runtimes: pl.DataFrame
    probes: pl.DataFrame
    samples: pl.DataFrame

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


Measured = TypeVar("Measured")
Measure = Callable[[Records], Measured]


@dataclass(frozen=True)
class _Batch(Generic[Measured]):
    """What some files held: `reading` has their heads, `problems` what is wrong with single records."""

    records: Records
    reading: Reading
    problems: list[Problem]
    num_bytes: int
    measured: Measured | None


def read_records(
    files: Sequence[TraceFile],
    sizes: Sequence[int],
    measure: Measure[Measured] | None = None,
    advance: Callable[[int], object] = lambda num_bytes: None,
) -> tuple[Records, list[Head], list[Problem], list[tuple[int, Measured]] | None]:
    """Valid records of files of `sizes` bytes, the heads of those that have records, what was left out, and measured.

    Several processes read, if it is much. What `measure` makes of the records of a batch of files is worked out where
    they are read: the last are its results, each with the row of `operations` at which the batch begins. `advance` is
    called with the number of bytes read, batch after batch.
    """
    work = partial(_read_batch, measure)
    parts: list[Records] = []
    problems: list[Problem] = []
    measured: list[tuple[int, Measured]] = []
    reading = Reading([], [], {})
    before = 0
    for batch in map_in_processes(work, list(batches(files, sizes)), processes_for(sum(sizes), PROCESSES_FROM_BYTES)):
        parts.append(_renumbered(batch.records, len(reading.heads), before))
        if batch.measured is not None:
            measured.append((before, batch.measured))
        before += batch.records.operations.height
        reading.add(batch.reading)
        problems += batch.problems
        advance(batch.num_bytes)
    problems = [*reading.problems, *version_problems(reading.other_versions), *problems]
    return _as_one(parts), reading.heads, problems, measured if measure else None


def _read_batch(measure: Measure[Measured] | None, batch: tuple[list[TraceFile], int]) -> _Batch[Measured]:
    files, num_bytes = batch
    reading = Reading([], [], {})
    parts, problems = _read_texts(read_files(files, reading), reading)
    befores = accumulate((part.operations.height for part in parts), initial=0)
    records = _as_one([_renumbered(part, 0, before) for part, before in zip(parts, befores, strict=False)])
    return _Batch(records, reading, problems, num_bytes, measure(records) if measure else None)


def _read_texts(texts: list[FileText], reading: Reading) -> tuple[list[Records], list[Problem]]:
    """Records of the files in columns; where something is wrong they are halved until a file stands alone."""
    frames = read_columns(texts)
    records = None if frames is None else _tables(frames, texts)
    if records is not None:
        return [records], []
    if len(texts) > 1:
        middle = len(texts) // 2
        first, found = _read_texts(texts[:middle], reading)
        second, more = _read_texts(texts[middle:], reading)
        return first + second, found + more
    frames, problems = read_lines(texts[0], reading)
    records = _tables(frames, texts)
    assert records is not None, "what contradicts was left out"
    return [records], problems


def _renumbered(records: Records, files: int, operations: int) -> Records:
    """Records behind those of so many files, which have so many operations."""
    tables = records.tables
    if files:
        tables = {
            name: table.with_columns(pl.col(FILE) + pl.lit(files, pl.Int32)) if name != "spans" else table
            for name, table in tables.items()
        }
    if operations:
        tables["spans"] = records.spans.with_columns(pl.col("op") + pl.lit(operations, pl.UInt32))
    return Records(**tables)


def _as_one(parts: list[Records]) -> Records:
    return Records(**{name: pl.concat([part.tables[name] for part in parts]) for name in parts[0].tables})


def only_files(records: Records, keep: pl.Expr) -> Records:
    """Records of the files that match `keep`, a condition on file_index."""
    operations = records.operations.with_row_index("old").filter(keep)
    kept = operations.select("old", pl.int_range(pl.len(), dtype=pl.UInt32).alias("new"))
    spans = records.spans.join(kept, left_on="op", right_on="old", how="inner", maintain_order="left")
    spans = spans.select(pl.col("new").alias("op"), *records.spans.columns[1:])
    others = {name: table.filter(keep) for name, table in records.tables.items() if name not in ("operations", "spans")}
    return Records(**others, operations=operations.drop("old"), spans=spans)


def _tables(frames: Frames, texts: list[FileText]) -> Records | None:
    """The valid records of one batch; None if some contradict others."""
    # In the tables `op` is the row of an operation; its number within its process is `op_id`.
    frames = {name: frame.rename({"op": "op_id"}, strict=False) for name, frame in frames.items()}
    operations = _operations(frames["operation_begin"], frames["operation_label"], frames["operation_end"])
    if operations is None:
        return None
    span, probe = _rows_of(operations, frames[SPAN]), _rows_of(operations, frames["probe"])
    if not (_follow(operations, frames[SPAN], span) and _follow(operations, frames["probe"], probe)):
        return None
    spans = frames[SPAN].with_columns(
        span.alias("op"),
        pl.coalesce("duration_ns", pl.col("end_ns") - pl.col("start_ns")).alias("duration_ns"),
        pl.col("thread").fill_null(MAIN_THREAD),
        pl.col("blocking").fill_null(True),
    )
    if not _phases_are_known(operations["operation"].gather(span), spans):
        return None
    processes = [text.head.process for text in texts]
    files = pl.DataFrame(
        {FILE: [text.index for text in texts]} | {name: [p[name] for p in processes] for name in ("cycle", "rank")},
        schema={FILE: pl.Int32, "cycle": pl.Int64, "rank": pl.Int64},
    )
    columns = list(TYPE_SCHEMAS[SPAN])
    return Records(
        operations=_placed(operations, files),
        spans=sorted_by_op(spans.select(columns)),
        iterations=_placed(frames["iteration"], files),
        events=_placed(frames["event"], files),
        runtimes=_placed(frames["runtime"].unique(FILE, keep="last", maintain_order=True), files),
        probes=_placed(
            frames["probe"].with_columns(operations["operation"].gather(probe).cast(pl.String)), files
        ).select(FILE, "cycle", "rank", "operation", "op_id", "at", "time_ns", "values"),
        samples=_placed(frames["sample"], files),
    )


def no_records() -> Records:
    """Tables without rows."""
    empty = {
        name: pl.DataFrame(schema=schema | {FILE: pl.Int32(), LINE: pl.UInt32()})
        for name, schema in TYPE_SCHEMAS.items()
    }
    records = _tables(empty, [])
    assert records is not None, "nothing contradicts nothing"
    return records


def _placed(table: pl.DataFrame, files: pl.DataFrame) -> pl.DataFrame:
    """The table with cycle and rank of each row's file; an event may be of another cycle than its file."""
    own = ["cycle"] if "cycle" in table.columns else []
    placed = table.drop(LINE).join(files, on=FILE, how="left", maintain_order="left", suffix="_of_file")
    for name in own:
        placed = placed.with_columns(pl.coalesce(name, f"{name}_of_file").alias(name)).drop(f"{name}_of_file")
    return placed.select(FILE, "cycle", "rank", pl.exclude(FILE, "cycle", "rank"))


def _operations(begins: pl.DataFrame, labels: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame | None:
    """One row per operation; None if one begins or ends twice, ends before it starts, or does not begin."""
    key = [FILE, "op_id"]
    if any(marks.select(pl.struct(key).is_duplicated().any()).item() for marks in (begins, ends)):
        return None
    if not all(_follow(begins, rows, _rows_of(begins, rows)) for rows in (labels, ends)):
        return None
    labels, ends = labels.drop(LINE), ends.drop(LINE)
    found = labels.group_by(key, maintain_order=True).agg(pl.col("tag", "step", "engine", "tier").drop_nulls().last())
    operations = (
        begins.join(found, on=key, how="left", suffix="_found")
        .with_columns(pl.coalesce(f"{name}_found", name).alias(name) for name in ("tag", "step", "engine"))
        .join(ends, on=key, how="left")
        .with_columns(pl.col("outcome").fill_null("unfinished"))
        .sort(key, maintain_order=True)
    )
    if (operations["end_ns"] < operations["start_ns"]).any():
        return None
    return operations.select(
        *key, LINE, "operation", "tag", "step", "engine", pl.col("inferred", "weights_only").fill_null(False),
        pl.col("ranks").alias("said_ranks"), "tier", "start_ns", "end_ns", "outcome", "bytes", "num_files", "durable",
        "error",
    )  # fmt: skip


def _rows_of(operations: pl.DataFrame, records: pl.DataFrame) -> pl.Series:
    """The row of each record's operation, null if it has none."""
    rows = operations.select(FILE, "op_id").with_row_index("op")
    # A process numbers its operations from 0, so the row is that of its first one and op_id more.
    first = rows.filter(pl.col("op_id") == 0)
    row = records[FILE].replace_strict(first[FILE], first["op"], default=None, return_dtype=pl.Int64) + records["op_id"]
    if not row.has_nulls() and row.is_between(0, rows.height - 1).all():
        right = (rows[FILE].gather(row) == records[FILE]) & (rows["op_id"].gather(row) == records["op_id"])
        if right.all():
            return row.cast(pl.UInt32).alias("op")
    return records.select(FILE, "op_id").join(rows, on=[FILE, "op_id"], how="left", maintain_order="left")["op"]


def _follow(operations: pl.DataFrame, records: pl.DataFrame, rows: pl.Series) -> bool:
    """Whether each record comes after the begin of its operation, whose row `rows` says."""
    return not rows.has_nulls() and bool((operations[LINE].gather(rows) < records[LINE]).all())


def _phases_are_known(operation: pl.Series, spans: pl.DataFrame) -> bool:
    """Whether operation, phase and detail go together: looked up as one number each."""

    def code(operation: int, phase: int, detail: int | None) -> int:
        return (operation * 256 + phase) * 256 + (255 if detail is None else detail)

    place = {name: index for index, name in enumerate(NAME.categories)}
    known = [
        code(number, place[phase], None if detail is None else place[detail])
        for number, phases in enumerate(PHASES.values())
        for phase, details in phases.items()
        for detail in details or (None,)
    ]
    numbers = (
        operation.to_physical().cast(pl.UInt32) * 256 + spans["phase"].to_physical().cast(pl.UInt32)
    ) * 256 + spans["detail"].to_physical().cast(pl.UInt32).fill_null(255)
    return bool(numbers.is_in(known).all())
