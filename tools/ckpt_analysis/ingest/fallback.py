"""The slow reader: reads files with invalid records line by line, so that an invalid line costs only that line."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import polars as pl

from restart_trace.schema import type_of

from ..common.names import FILE, LINE, TYPE_SCHEMAS
from ..common.problems import Problem
from .columns import Frames
from .files import FileText, Reading
from .lines import LineReader, other_version

_NAMED_FAULTS = 3  # how many bad lines of a file are described; all are counted


def read_lines(text: FileText, reading: Reading) -> tuple[Frames, list[Problem]]:
    """(records that can be used, what was left out). Records of other versions are counted in `reading`."""
    reader = LineReader(text.head.process)
    name = text.head.file.path.name
    records: list[tuple[int, dict[str, Any]]] = []  # with the numbers of their lines
    wrong: list[str] = []
    strays: Counter[str] = Counter()  # run -> records of another process of it
    for number, content in enumerate(text.lines(), start=2):
        if not content.strip():
            continue
        line = reader.read(content, number)
        if line.record is not None:
            records.append((number, line.record))
        elif line.process is not None and (version := other_version(line.process)) is not None:
            counts = reading.other_versions.setdefault(version, {})
            counts[name] = counts.get(name, 0) + 1
        elif line.process is not None and line.process["run_id"] != text.head.process["run_id"]:
            strays[line.process["run_id"]] += 1
        else:
            wrong.append(f"line {number}: {line.faults[0]}")
    problems = [_invalid(name, wrong)] if wrong else []
    problems += [_stray_run(name, run, count, text.head.process["run_id"]) for run, count in strays.items()]
    return {record_type: _frame(record_type, records, text.index) for record_type in TYPE_SCHEMAS}, problems


def _frame(record_type: str, records: list[tuple[int, dict[str, Any]]], index: int) -> pl.DataFrame:
    schema = TYPE_SCHEMAS[record_type]
    rows = [
        {name: _cell(record.get(name), kind) for name, kind in schema.items()} | {LINE: number}
        for number, record in records
        if type_of(record) == record_type
    ]
    frame = pl.DataFrame(rows, schema=schema | {LINE: pl.UInt32()})
    return frame.with_columns(pl.lit(index, pl.Int32).alias(FILE)).select(*schema, FILE, LINE)


def _cell(value: Any, kind: Any) -> Any:
    """A value as its column has it: an object as its JSON text, an int of any size as a float if need be."""
    if isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    return float(value) if value is not None and kind == pl.Float64 else value


def _invalid(name: str, reasons: list[str]) -> Problem:
    """The problem of a file some of whose lines are no records or records that cannot be."""
    count, named = len(reasons), reasons[:_NAMED_FAULTS]
    more = f" and {count - len(named)} more" if count > len(named) else ""
    message = f"{name}: {count} invalid record{'s' * (count > 1)} left out ({'; '.join(named)}{more})"
    return Problem("invalid_record", message, {"file": name, "count": count})


def _stray_run(name: str, run_id: str, count: int, own: str) -> Problem:
    message = f"{name}: {count} records of another run, {run_id}, follow those of {own}: left out"
    return Problem("mixed_runs", message, {"analysed": own, "left_out": [run_id]})
