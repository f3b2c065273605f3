"""Record files to one frame of valid records.

All files are scanned at once by polars with an explicit schema. Where a file does not parse, the set is
halved until that file stands alone, and it alone is read line by line: one bad line costs a line, not a file.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

import polars as pl

from megatron.restart_trace.schema import RECORD_FIELDS, SCHEMA_VERSION, check_phase, check_record
from tools.ckpt_analysis.head import Head
from tools.ckpt_analysis.lines import LineFault, read_lines
from tools.ckpt_analysis.problems import Problem

_POLARS_TYPES = {"int": pl.Int64(), "float": pl.Float64(), "str": pl.String(), "bool": pl.Boolean()}
# Fields that hold objects are read elsewhere (process records) or not at all yet (probes).
COLUMN_TYPES: dict[str, str] = {
    name: field.json_type
    for fields in RECORD_FIELDS.values()
    for name, field in fields.items()
    if field.json_type in _POLARS_TYPES
}
_SCHEMA: dict[str, pl.DataType] = {name: _POLARS_TYPES[kind] for name, kind in COLUMN_TYPES.items()}
_FILE = "file_index"
_NAMED_FAULTS = 3  # how many bad lines of a file are described; all are counted


def read_records(heads: list[Head]) -> tuple[pl.DataFrame, list[Problem]]:
    """Valid records of the files, with the column `file_index` (place of the file in `heads`)."""
    problems: list[Problem] = []
    whole = [index for index, head in enumerate(heads) if not head.torn]
    frames = _scan(heads, whole, problems) if whole else []
    for index, head in enumerate(heads):
        if head.torn:
            frames.append(_read_line_by_line(head.file.path, index, problems))
    frame = pl.concat(frames) if frames else pl.DataFrame(schema=_SCHEMA | {_FILE: pl.Int32()})
    frame, found = _drop_other_versions(frame, heads)
    problems += found
    frame, found = _drop_invalid(frame, heads)
    return frame, problems + found


def _scan(heads: list[Head], indices: list[int], problems: list[Problem]) -> list[pl.DataFrame]:
    paths = {str(heads[index].file.path): index for index in indices}
    # polars expands glob characters in paths, and a directory may have some in its name.
    lazy = pl.scan_ndjson([glob.escape(p) for p in paths], schema=_SCHEMA, include_file_paths=_FILE)
    lazy = lazy.with_columns(pl.col(_FILE).replace_strict(paths, return_dtype=pl.Int32()))
    try:
        return [lazy.collect(engine="streaming")]
    except pl.exceptions.ComputeError:
        if len(indices) == 1:
            return [_read_line_by_line(heads[indices[0]].file.path, indices[0], problems)]
    middle = len(indices) // 2
    return _scan(heads, indices[:middle], problems) + _scan(heads, indices[middle:], problems)


def _read_line_by_line(path: Path, index: int, problems: list[Problem]) -> pl.DataFrame:
    records, faults = read_lines(path, COLUMN_TYPES)
    torn = [fault for fault in faults if fault.torn]
    bad = [fault for fault in faults if not fault.torn]
    if torn:
        message = f"{path.name}: the last line ({torn[0].number}) is cut short and was left out"
        problems.append(Problem("torn_line", message, {"file": path.name, "line": torn[0].number}))
    if bad:
        problems.append(_invalid(path.name, len(bad), [_describe(fault) for fault in bad[:_NAMED_FAULTS]]))
    frame = pl.DataFrame(records, schema=_SCHEMA)
    return frame.with_columns(pl.lit(index, dtype=pl.Int32()).alias(_FILE))


def _describe(fault: LineFault) -> str:
    return f"line {fault.number}: {fault.reason}"


def _invalid(name: str, count: int, reasons: list[str]) -> Problem:
    more = f" and {count - len(reasons)} more" if count > len(reasons) else ""
    message = f"{name}: {count} invalid record{'s' * (count > 1)} left out ({'; '.join(reasons)}{more})"
    return Problem("invalid_record", message, {"file": name, "count": count})


def _drop_other_versions(frame: pl.DataFrame, heads: list[Head]) -> tuple[pl.DataFrame, list[Problem]]:
    """Leave out records of other schema versions: their names may mean something else."""
    other = frame.filter(pl.col("v").is_not_null() & (pl.col("v") != SCHEMA_VERSION))
    problems = []
    counts = other.group_by("v").agg(pl.len().alias("count"), pl.col(_FILE).unique().sort()).sort("v")
    for row in counts.iter_rows(named=True):
        names = [heads[index].file.path.name for index in row[_FILE]]
        message = (
            f"{row['count']} records of {len(names)} file(s) ({names[0]}, ...) have schema version "
            f"{row['v']}; this tool reads version {SCHEMA_VERSION}, so they were left out: use the tool of "
            "that version"
        )
        data = {"version": row["v"], "count": row["count"], "files": names}
        problems.append(Problem("unknown_schema_version", message, data))
    return frame.filter(pl.col("v").is_null() | (pl.col("v") == SCHEMA_VERSION)), problems


def _drop_invalid(frame: pl.DataFrame, heads: list[Head]) -> tuple[pl.DataFrame, list[Problem]]:
    """Leave out records without a required field, of an unknown phase, or that end before they start."""
    valid = (_complete() & _sane_times() & ~_has_phase(_unknown_phases(frame))).fill_null(False)
    frame = frame.with_columns(valid.alias("valid"))
    problems = []
    bad = frame.filter(~pl.col("valid"))
    for index in sorted(bad[_FILE].unique()):
        rows = bad.filter(pl.col(_FILE) == index)
        reasons = [_reason(row) for row in rows.head(_NAMED_FAULTS).iter_rows(named=True)]
        problems.append(_invalid(heads[index].file.path.name, rows.height, reasons))
    return frame.filter("valid").drop("valid"), problems


def _unknown_phases(frame: pl.DataFrame) -> list[dict[str, Any]]:
    triples = frame.filter(pl.col("type") == "span").select("operation", "phase", "detail").unique()
    return [row for row in triples.iter_rows(named=True) if check_phase(**row)]


def _has_phase(triples: list[dict[str, Any]]) -> pl.Expr:
    """Whether a record is a span of one of these operations, phases and details."""
    among = [
        pl.all_horizontal(pl.col(name).eq_missing(pl.lit(value, pl.String)) for name, value in triple.items())
        for triple in triples
    ]
    return pl.col("type").eq_missing("span") & (pl.any_horizontal(among) if among else pl.lit(False))


def _complete() -> pl.Expr:
    """Whether a record has every required field of its type."""
    complete = pl.lit(False)
    for record_type, fields in RECORD_FIELDS.items():
        required = [n for n, f in fields.items() if f.required and n in COLUMN_TYPES]
        has_all = pl.all_horizontal(pl.col(name).is_not_null() for name in required)
        complete = pl.when(pl.col("type") == record_type).then(has_all).otherwise(complete)
    # Process records were checked with their objects when the heads were read.
    return complete | (pl.col("type") == "process")


def _sane_times() -> pl.Expr:
    window = pl.col("end_ns") - pl.col("start_ns")
    return (window >= 0).fill_null(True) & pl.col("duration_ns").is_between(0, window).fill_null(True)


def _reason(row: dict[str, Any]) -> str:
    record = {name: value for name, value in row.items() if value is not None and name in COLUMN_TYPES}
    faults = check_record(record)
    return faults[0] if faults else f"{record['type']} has impossible times"
