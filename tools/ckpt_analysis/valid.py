"""Which of the decoded records can be used: known version, complete, possible, and of the file they are in."""

from __future__ import annotations

from typing import Any

import polars as pl

from megatron.restart_trace.schema import PHASES, RECORD_FIELDS, SCHEMA_VERSION, check_phase, check_record
from tools.ckpt_analysis.decode import NAMED_FAULTS, describe_invalid
from tools.ckpt_analysis.head import Head
from tools.ckpt_analysis.names import COLUMN_TYPES, FILE, NAME, OPERATION, RECORD_TYPE, TYPE_SCHEMAS
from tools.ckpt_analysis.problems import Problem

_COMMON = ["v", "type", "run_id", "cycle", "rank", "tp", "pp", "dp"]


def drop_unusable(frame: pl.DataFrame, heads: list[Head]) -> tuple[pl.DataFrame, pl.DataFrame, list[Problem]]:
    """(records that can be used, counts of those of other versions, problems).

    The counts have the columns v, file_index and count; `other_versions` makes problems of them once all
    files are read. Files whose records are of another rank or cycle than their name says are left out whole.
    """
    other = frame.filter(pl.col("v") != SCHEMA_VERSION)
    versions = other.group_by("v", FILE).agg(pl.len().alias("count"))
    if not other.is_empty():
        frame = frame.filter(pl.col("v").is_null() | (pl.col("v") == SCHEMA_VERSION))
    frame, problems = _drop_invalid(frame, heads)
    frame, found = _drop_wrong_names(frame, heads)
    return frame, versions, problems + found


def other_versions(counts: list[pl.DataFrame], heads: list[Head]) -> list[Problem]:
    """One problem per version that this tool does not know: its names may mean something else."""
    problems: list[Problem] = []
    if not counts:
        return problems
    table = pl.concat(counts).group_by("v").agg(pl.col("count").sum(), pl.col(FILE).unique().sort()).sort("v")
    for row in table.iter_rows(named=True):
        names = [heads[index].file.path.name for index in row[FILE]]
        message = (
            f"{row['count']} records of {len(names)} file(s) ({names[0]}, ...) have schema version "
            f"{row['v']}; this tool reads version {SCHEMA_VERSION}, so they were left out: use the tool of "
            "that version"
        )
        data = {"version": row["v"], "count": row["count"], "files": names}
        problems.append(Problem("unknown_schema_version", message, data))
    return problems


def _drop_invalid(frame: pl.DataFrame, heads: list[Head]) -> tuple[pl.DataFrame, list[Problem]]:
    """Leave out records without a required field, of an unknown phase, or that end before they start."""
    kind = pl.col("type").cast(RECORD_TYPE, strict=False)
    valid = pl.lit(False)
    for record_type in RECORD_FIELDS:
        is_one = _has(_COMMON) & possible(record_type)
        valid = pl.when(kind == record_type).then(is_one).otherwise(valid)
    frame = frame.with_columns(kind, valid.fill_null(False).alias("valid"), pl.col("type").alias("type_text"))
    bad = frame.filter(~pl.col("valid"))
    if bad.is_empty():
        return frame.drop("valid", "type_text"), []
    problems = []
    for index in sorted(bad[FILE].unique()):
        rows = bad.filter(pl.col(FILE) == index).with_columns(pl.col("type_text").alias("type"))
        reasons = [_reason(row) for row in rows.head(NAMED_FAULTS).iter_rows(named=True)]
        problems.append(describe_invalid(heads[index].file.path.name, rows.height, reasons))
    return frame.filter("valid").drop("valid", "type_text"), problems


def possible(record_type: str) -> pl.Expr:
    """Whether a record has every required field of its type beside those of all types, and can be.

    Process records are checked with their objects when the heads are read.
    """
    if record_type == "process":
        return pl.lit(True)
    schema = TYPE_SCHEMAS[record_type]
    valid = _has([n for n, f in RECORD_FIELDS[record_type].items() if f.required and n in schema])
    if {"start_ns", "end_ns"} <= set(schema):
        window = pl.col("end_ns") - pl.col("start_ns")
        valid &= window >= 0
        if "duration_ns" in schema:
            valid &= pl.col("duration_ns").is_between(0, window)
    return (valid & _known_phase()).fill_null(False) if record_type == "span" else valid.fill_null(False)


def _has(names: list[str]) -> pl.Expr:
    return pl.all_horizontal(pl.col(name).is_not_null() for name in names)


def _known_phase() -> pl.Expr:
    """Whether operation, phase and detail go together: looked up as one number each."""
    known = [
        (operation, phase, detail)
        for operation, phases in PHASES.items()
        for phase in phases
        for detail in (*phases[phase], None)
        if not check_phase(operation, phase, detail)
    ]
    place = {name: index for index, name in enumerate(NAME.categories)}
    numbers = [
        (OPERATION.categories.to_list().index(operation) * 256 + place[phase]) * 256
        + (255 if detail is None else place[detail])
        for operation, phase, detail in known
    ]
    detail = pl.col("detail").cast(NAME, strict=False).to_physical().cast(pl.UInt32)
    # An unknown word becomes null, and with it the sum; a missing detail has a number of its own.
    detail = pl.when(pl.col("detail").is_null()).then(pl.lit(255, pl.UInt32)).otherwise(detail)
    phase = pl.col("phase").cast(NAME, strict=False).to_physical().cast(pl.UInt32)
    operation = pl.col("operation").cast(OPERATION, strict=False).to_physical().cast(pl.UInt32)
    return ((operation * 256 + phase) * 256 + detail).is_in(numbers).fill_null(False)


def _reason(row: dict[str, Any]) -> str:
    record = {name: value for name, value in row.items() if value is not None and name in COLUMN_TYPES}
    if row["values"] is not None:
        record["values"] = {}  # was an object, or the line would not have been read
    faults = check_record(record)
    return faults[0] if faults else f"{record['type']} has impossible times"


def _drop_wrong_names(frame: pl.DataFrame, heads: list[Head]) -> tuple[pl.DataFrame, list[Problem]]:
    """Leave out files whose records are of another rank or cycle than their name: renamed copies."""
    problems: list[Problem] = []
    wrong: set[int] = set()
    identities = frame.select(FILE, "rank", "cycle").unique().sort(pl.all())
    for index, rank, cycle in identities.iter_rows():
        file = heads[index].file
        if file.rank is None or index in wrong or (rank, cycle) == (file.rank, file.cycle):
            continue
        wrong.add(index)
        name = file.path.name
        message = f"{name}: its records are of rank {rank}, cycle {cycle}; the file was left out"
        problems.append(Problem("wrong_file_name", message, {"file": name, "rank": rank, "cycle": cycle}))
        heads[index] = Head(file, None)
    if not wrong:
        return frame, []
    return frame.filter(~pl.col(FILE).is_in(sorted(wrong))), problems
