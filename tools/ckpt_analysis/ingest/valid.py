"""Which of the decoded records can be used: known version, complete, possible, and of the file they are in."""

from __future__ import annotations

import functools
import json
from typing import Any

import polars as pl

from restart_trace.schema import (
    PHASES,
    RECORD_FIELDS,
    SCHEMA_VERSION,
    WORDS,
    check_phase,
    check_record,
    int_range,
)

from ..common.names import COLUMN_TYPES, FILE, NAME, OPERATION, RECORD_TYPE, TYPE_SCHEMAS
from ..common.problems import Problem
from .decode import NAMED_FAULTS, describe_invalid
from .head import Head

_PLACE = ["rank", "cycle", "tp", "pp", "dp"]
_COMMON = ["v", "type", "run_id", *_PLACE]
# An object of numbers, as JSON text: what a probe sampled.
_NUMBER = r"-?[0-9]{1,300}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?"
_PAIR = rf'"(?:[^"\\]|\\.)*": ?{_NUMBER}'
_NUMBERS = rf"^\{{(?:{_PAIR}(?:, ?{_PAIR})*)?\}}$"


def drop_unusable(frame: pl.DataFrame, heads: list[Head]) -> tuple[pl.DataFrame, pl.DataFrame, list[Problem]]:
    """(records that can be used, counts of those of other versions, problems).

    The counts have the columns v, file_index and count; `other_versions` makes problems of them once all
    files are read. Files whose records are all of another rank or cycle than their name says are left out whole.
    """
    other = frame.filter(pl.col("v") != SCHEMA_VERSION)
    versions = other.group_by("v", FILE).agg(pl.len().alias("count"))
    if not other.is_empty():
        frame = frame.filter(pl.col("v").is_null() | (pl.col("v") == SCHEMA_VERSION))
    frame, problems = _drop_invalid(frame, heads)
    frame, found = _drop_strangers(frame, heads)
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
        is_one = possible(record_type)
        if record_type == "process":  # judged with its objects when the heads are read, if it is where it should be
            is_one = pl.int_range(pl.len()).over(FILE) == 0
        else:
            is_one &= _has(_COMMON)
            for name in _PLACE:
                is_one &= pl.col(name).is_between(*int_range(name))
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


@functools.cache
def possible(record_type: str) -> pl.Expr:
    """Whether a record has every required field of its type beside those of all types, and can be.

    Process records are checked with their objects when the heads are read.
    """
    if record_type == "process":
        return pl.lit(True)
    fields = {name: field for name, field in RECORD_FIELDS[record_type].items() if name in TYPE_SCHEMAS[record_type]}
    valid = _has([name for name, field in fields.items() if field.required])
    for name, field in fields.items():
        if field.json_type == "int":
            valid &= pl.col(name).is_between(*int_range(name)).fill_null(True)
        elif field.json_type == "float":
            valid &= pl.col(name).abs().lt(1e300).fill_null(True)
        elif name in WORDS and record_type != "span":  # whose operation is looked up with its phase
            valid &= pl.col(name).is_in(WORDS[name])
    if "values" in RECORD_FIELDS[record_type]:
        valid &= pl.col("values").str.contains(_NUMBERS)
    if "end_ns" in fields:
        window = pl.col("end_ns") - pl.col("start_ns")
        valid &= window >= 0
        if "duration_ns" in fields:
            valid &= pl.col("duration_ns") <= window
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
    fields = RECORD_FIELDS.get(row["type"] or "", COLUMN_TYPES)
    record = {name: value for name, value in row.items() if value is not None and name in COLUMN_TYPES}
    if record.get("type") == "process":
        return "the first record of a file, and no other, is its process record"
    record = {name: value for name, value in record.items() if name in fields}
    if row["values"] is not None:
        record["values"] = json.loads(row["values"])
    return check_record(record)[0]


def _drop_strangers(frame: pl.DataFrame, heads: list[Head]) -> tuple[pl.DataFrame, list[Problem]]:
    """Leave out records of another rank, cycle or place than their file's, and files that were renamed.

    A process record that no other record of its file agrees with is left out itself.
    """
    problems: list[Problem] = []
    keep = pl.lit(True)
    counts = (
        frame.group_by(FILE, *_PLACE, "run_id", (pl.col("type") == "process").alias("is_head"))
        .agg(pl.len().alias("count"))
        .sort(FILE, pl.col("count"), *_PLACE, "run_id", descending=[False, True, *[False] * 6])
    )
    for rows in counts.partition_by(FILE, maintain_order=True):
        index = rows[FILE][0]
        place, found = _place_of(rows, heads, index)
        problems += found
        file = heads[index].file
        if file.rank is not None and (place["rank"], place["cycle"]) != (file.rank, file.cycle):
            problems.append(_wrong_name(file.path.name, place))
            heads[index] = Head(file, None)
            keep &= pl.col(FILE) != index
            continue
        if file.rank is None:  # a supervisor tells of every cycle
            del place["cycle"]
        strange = pl.any_horizontal(pl.col(name) != value for name, value in place.items())
        count = int(rows.filter(strange & ~pl.col("is_head"))["count"].sum())
        if count:
            who = ", ".join(f"{name} {value}" for name, value in place.items())
            problems.append(describe_invalid(file.path.name, count, [f"not of this file's process, {who}"]))
            keep &= ~((pl.col(FILE) == index) & strange)
    return (frame.filter(keep) if problems else frame), problems


def _place_of(rows: pl.DataFrame, heads: list[Head], index: int) -> tuple[dict[str, int], list[Problem]]:
    """Rank, cycle and place that the records of a file are of: the process record's unless no other agrees.

    `rows`: what the records say, the most frequent first. The head is changed if it is not to be believed.
    """
    process, file = heads[index].process, heads[index].file
    others = rows.filter(~pl.col("is_head"))
    if process is not None:
        own = [name for name in _PLACE if file.rank is not None or name != "cycle"]
        agreeing = others.filter(*(pl.col(name) == process[name] for name in [*own, "run_id"]))
        if others.is_empty() or not agreeing.is_empty():
            return {name: process[name] for name in _PLACE}, []
    place = dict(zip(_PLACE, (rows if others.is_empty() else others).select(_PLACE).row(0), strict=True))
    if process is None:
        return place, []
    heads[index] = Head(file, None)
    message = f"{file.path.name}: line 1: is of another process than all records after it"
    return place, [Problem("no_process_record", message, {"file": file.path.name})]


def _wrong_name(name: str, place: dict[str, int]) -> Problem:
    """The problem of a renamed copy."""
    rank, cycle = place["rank"], place["cycle"]
    message = f"{name}: its records are of rank {rank}, cycle {cycle}; the file was left out"
    return Problem("wrong_file_name", message, {"file": name, "rank": rank, "cycle": cycle})
