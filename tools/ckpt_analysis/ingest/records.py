"""Record files to tables of valid records, one table per type, in columns as small as they can be.

Spans are most of a trace. They do not repeat what they share with their operation: `op` is its row in the
table of operations. Times are as recorded, on the clock of each host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import polars as pl

from ..common.intervals import sorted_by_op
from ..common.names import FILE, NAME, OPERATION, TYPE_SCHEMAS, WHO
from ..common.parallel import map_ahead
from ..common.problems import Problem
from .batches import FileText, Reading, read_batches
from .contradictions import OPERATION_KEY, drop_contradictions
from .decode import decode, torn_line
from .discover import TraceFile
from .head import Head
from .sound import decode_sorted, sort_lines
from .valid import drop_unusable, other_versions


@dataclass(frozen=True)
class Records:
    """Valid records; times on the clocks of their hosts.

    operations  one row per operation and rank, out of whichever of its records there are: file_index, run_id,
                cycle, rank, op_id, operation, tag, step, engine, start_ns, end_ns (null: no end), outcome,
                bytes, num_files, durable, error
    spans       op (row of `operations`), phase, detail, file, bytes, start_ns, end_ns, duration_ns, thread,
                blocking, error; sorted by op and start_ns
    iterations  file_index, run_id, cycle, rank, step, start_ns, end_ns, loss
    events      file_index, run_id, cycle, rank, operation, phase, detail, step, time_ns
    runtimes    file_index, run_id, cycle, rank and the fields of the runtime record
    probes      file_index, run_id, cycle, rank, operation, op_id, at, time_ns, values (JSON text)
    """

    operations: pl.DataFrame
    spans: pl.DataFrame
    iterations: pl.DataFrame
    events: pl.DataFrame
    runtimes: pl.DataFrame
    probes: pl.DataFrame

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def read_records(
    files: list[TraceFile], advance: Callable[[int], object] = lambda num_bytes: None
) -> tuple[Records, list[Head], list[Problem]]:
    """Valid records of the files, the heads of those that have records, and what was left out.

    `advance` is called with the number of bytes read, batch after batch.
    """
    reading = Reading([], [])
    parts: list[Records] = []
    versions: list[pl.DataFrame] = []
    found: list[Problem] = []
    work = map_ahead(lambda batch: _read_batch(batch, reading.heads), read_batches(files, reading))
    for records, counts, problems, num_bytes in work:
        parts.append(records)
        versions += counts
        found += problems
        advance(num_bytes)
    problems = [*reading.problems, *other_versions(versions, reading.heads), *found]
    return concat_records(parts), reading.heads, problems


def _read_batch(
    batch: tuple[list[FileText], int], heads: list[Head]
) -> tuple[Records, list[pl.DataFrame], list[Problem], int]:
    """(records, counts of other versions, problems, bytes) of one batch. Changes the heads of its own files only."""
    texts, num_bytes = batch
    torn = [torn_line(text) for text in texts if text.torn]
    lines = sort_lines(texts, heads)
    frames = None if lines is None else decode_sorted(lines)
    if frames is not None and (records := _tables(frames)) is not None:
        return records, [], torn, num_bytes
    frames, counts, problems = _thorough(texts, heads)
    records = _tables(frames)
    assert records is not None, "what contradicts was left out"
    return records, [counts], torn + problems, num_bytes


def concat_records(parts: list[Records]) -> Records:
    """Records of several batches as one; `op` goes on counting."""
    before = 0
    numbered = []
    for part in parts:
        numbered.append(part.spans.with_columns(pl.col("op") + pl.lit(before, pl.UInt32)))
        before += part.operations.height
    tables = {
        name: pl.concat([part.tables[name] for part in parts]) for name in parts[0].tables if name != "spans"
    }
    return Records(**tables, spans=pl.concat(numbered))


def only_files(records: Records, keep: pl.Expr) -> Records:
    """Records that match `keep`, a condition on file_index and run_id."""
    operations = records.operations.with_row_index("old").filter(keep)
    kept = operations.select("old", pl.int_range(pl.len(), dtype=pl.UInt32).alias("new"))
    spans = records.spans.join(kept, left_on="op", right_on="old", how="inner", maintain_order="left")
    spans = spans.select(pl.col("new").alias("op"), *records.spans.columns[1:])
    others = {
        name: table.filter(keep)
        for name, table in records.tables.items()
        if name not in ("operations", "spans")
    }
    return Records(**others, operations=operations.drop("old"), spans=spans)


def _thorough(
    texts: list[FileText], heads: list[Head]
) -> tuple[dict[str, pl.DataFrame], pl.DataFrame, list[Problem]]:
    """(valid records by type, counts of those of other versions, problems) of a batch with something wrong."""
    frame, problems = decode(texts)
    frame, versions, found = drop_unusable(frame, heads)
    problems += found
    frame = frame.with_columns(pl.col("run_id").cast(pl.Categorical))
    frames = {
        name: frame.filter(pl.col("type") == name).select(*schema, FILE, *WHO)
        for name, schema in TYPE_SCHEMAS.items()
    }
    frames["span"] = frames["span"].with_columns(
        pl.col("phase", "detail").cast(NAME), pl.col("operation").cast(OPERATION)
    )
    frames, found = drop_contradictions(frames, _gaps(frames, problems, heads), heads)
    return frames, versions, problems + found


def _gaps(frames: dict[str, pl.DataFrame], problems: list[Problem], heads: list[Head]) -> set[int]:
    """Files that lack records: some were left out, or could not be written."""
    damaged = {problem.data["file"] for problem in problems if problem.kind == "invalid_record"}
    events = frames["event"]
    full = set(events.filter(pl.col("phase") == "records_lost")[FILE])
    return full | {index for index, head in enumerate(heads) if head.file.path.name in damaged}


def _tables(frames: dict[str, pl.DataFrame]) -> Records | None:
    """The valid records of one batch; None if some contradict others, or the operation of a span is unknown."""
    found = _operations_and_spans(frames["operation_begin"], frames["operation_end"], frames["span"])
    if found is None or _contradicts(frames["probe"], found[0]):
        return None
    operations, spans = found

    def of(record_type: str, *names: str) -> pl.DataFrame:
        return frames[record_type].select(FILE, *WHO, *names)

    return Records(
        operations=operations,
        spans=sorted_by_op(
            spans.select(
                "op", "phase", "detail", "file", "bytes", "start_ns", "end_ns",
                "duration_ns", pl.col("thread").cast(pl.Categorical), "blocking",
                pl.col("error").cast(pl.Categorical),
            )
        ),
        iterations=of("iteration", "step", "start_ns", "end_ns", "loss"),
        events=of("event", "operation", "phase", "detail", "step", "time_ns"),
        runtimes=of(
            "runtime", "engine_used", "engine_asked", "optimizer", "accelerator", "backend", "parameters",
            "save_dir",
        ),
        probes=of("probe", "operation", "op_id", "at", "time_ns", "values"),
    )  # fmt: skip


def _operations_and_spans(
    begins: pl.DataFrame, ends: pl.DataFrame, spans: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame] | None:
    """(operations, spans with the column op); None as `_tables`."""
    operations = _from_marks(begins, ends)
    if operations is None:
        return None
    op = _rows_of(operations, spans)
    if op.has_nulls():  # spans of operations whose own records were lost
        if "rank" not in spans.columns:
            return None
        lost = spans.filter(op.is_null())
        begun = lost.group_by(OPERATION_KEY).agg(pl.col("operation").first(), pl.col("start_ns").min())
        operations = pl.concat([operations, begun], how="diagonal").sort(FILE, "op_id", maintain_order=True)
        op = _rows_of(operations, spans)
    if (operations["operation"].gather(op) != spans["operation"]).any():
        return None
    spans = spans.with_columns(op)
    operations = _with_labels_of_spans(operations.with_row_index("op"), spans).drop("op")
    return operations.with_columns(pl.col("outcome").fill_null("unfinished")), spans


def _contradicts(probes: pl.DataFrame, operations: pl.DataFrame) -> bool:
    """Whether a probe names another operation than the one that its op_id is of."""
    both = probes.select(*OPERATION_KEY, pl.col("operation").cast(OPERATION)).join(operations, on=OPERATION_KEY)
    return bool((both["operation"] != both["operation_right"]).any())


def _from_marks(begins: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame | None:
    """Operations that have a begin or an end; None if one has two, or they contradict each other."""

    def of(found: pl.DataFrame, *names: str) -> pl.DataFrame:
        return found.select(*OPERATION_KEY, pl.col("operation").cast(OPERATION), *names)

    labels = ("tag", "step", "engine", "start_ns")
    begins = of(begins, *labels)
    ends = of(ends, *labels, "end_ns", "outcome", "bytes", "num_files", "durable", "error")
    for marks in (begins, ends):
        if marks.select(pl.struct(OPERATION_KEY).is_duplicated().any()).item():
            return None
    both = begins.join(ends, on=OPERATION_KEY, how="full", coalesce=True, suffix="_at_end")
    if any((both[name] != both[f"{name}_at_end"]).any() for name in ("operation", "start_ns")):
        return None
    return both.select(
        *OPERATION_KEY,
        pl.coalesce("operation", "operation_at_end"),
        *(pl.coalesce(f"{name}_at_end", name).alias(name) for name in ("tag", "step", "engine")),
        pl.coalesce("start_ns", "start_ns_at_end"),
        "end_ns", "outcome", "bytes", "num_files", "durable", "error",
    ).sort(FILE, "op_id", maintain_order=True)  # fmt: skip


def _rows_of(operations: pl.DataFrame, spans: pl.DataFrame) -> pl.Series:
    """The row of each span's operation, null if it has none."""
    # Spans that do not say who they are of are of files that are of one process each.
    key = [name for name in OPERATION_KEY if name in spans.columns]
    rows = operations.select(key).with_row_index("op")
    if len(key) == 2 and (counted := _counted_rows(rows, spans)) is not None:
        return counted
    return spans.select(key).join(rows, on=key, how="left", maintain_order="left")["op"]


def _counted_rows(rows: pl.DataFrame, spans: pl.DataFrame) -> pl.Series | None:
    """`_rows_of` where operations count from 0 in every file: the row of the file's first, and op_id more."""
    first = rows.unique(FILE, keep="first")
    row = (
        spans[FILE].replace_strict(first[FILE], first["op"], default=None, return_dtype=pl.Int64)
        + spans["op_id"]
    )
    if row.has_nulls() or not row.is_between(0, rows.height - 1).all():
        return None
    right = (rows[FILE].gather(row) == spans[FILE]) & (rows["op_id"].gather(row) == spans["op_id"])
    return row.cast(pl.UInt32).alias("op") if right.all() else None


def _with_labels_of_spans(operations: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Tag and step as the spans give them where the end does not: a load learns its tag after its begin."""
    unsure = operations.filter(
        (pl.col("operation") != "startup") & pl.any_horizontal(pl.col("outcome", "tag", "step").is_null())
    )
    found = (
        spans.filter(pl.col("op").is_in(unsure["op"].implode()))
        .group_by("op")
        .agg(pl.col("tag", "step").drop_nulls().last())
    )
    joined = operations.join(found, on="op", how="left", maintain_order="left", suffix="_of_spans")
    ended = pl.col("outcome").is_not_null()
    return joined.with_columns(
        pl.when(ended)
        .then(pl.coalesce(name, f"{name}_of_spans"))
        .otherwise(pl.coalesce(f"{name}_of_spans", name))
        .alias(name)
        for name in ("tag", "step")
    ).drop("tag_of_spans", "step_of_spans")
