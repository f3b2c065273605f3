"""The fast reader: decodes files without invalid records, which most files are, into columns.

It reads one line of each shape as JSON, compares the other lines with it byte by byte, and decodes the bytes that
differ as arrays. If a line is invalid it returns None without a reason; `fallback` then reads the files line by line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from restart_trace.schema import RECORD_FIELDS, check_record, int_range, type_of

from ..common.names import FILE, LINE, TYPE_SCHEMAS
from .files import FileText
from .lines import parse_json
from .shapes import MARGIN, Rows, Shape, Slot, shape_of

Frames = dict[str, pl.DataFrame]  # record type -> its columns, file_index and line, in the order of the files

_LONGEST = 4096  # bytes of a line; longer ones are read one by one
_MOST_SHAPES = 64  # of one length; lines of further ones are read one by one
_NUMBER = r"-?(?:0|[1-9][0-9]{0,199})(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
_NUMBERS = re.compile(rf"(?:{_NUMBER}\n)*")
_KEY = r'"[^"\\\x00-\x1f]*":'
# Objects in records hold numbers only.
_OBJECTS = {
    name: rf"^\{{(?:{_KEY}{number}(?:,{_KEY}{number})*)?\}}$"
    for name, number in {"values": _NUMBER, "layout": "(?:0|[1-9][0-9]{0,14})"}.items()
}


class _NotAllValidError(Exception):
    """A line is no valid record."""


@dataclass(frozen=True)
class _Found:
    """Lines of one shape: their places among all lines, and their bytes."""

    shape: Shape
    places: np.ndarray
    rows: Rows


def read_columns(texts: list[FileText]) -> Frames | None:
    """Frames of the files' records after the first; None if a line is no valid record."""
    parts = [memoryview(text.content)[text.start :] for text in texts]
    content = b"".join([bytes(MARGIN), *parts, bytes(_LONGEST + MARGIN)])
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n"))
    starts = np.concatenate([[MARGIN], ends + 1])[:-1]
    lines_of = np.diff(np.searchsorted(ends, MARGIN + np.cumsum([len(part) for part in parts])), prepend=0)
    files = np.repeat(np.array([text.index for text in texts], np.int32), lines_of)
    by_type: dict[str, list[_Found]] = {name: [] for name in TYPE_SCHEMAS}
    try:
        for found in _shapes(content, starts, ends):
            by_type[type_of(found.shape.record)].append(found)
        return {name: _frame(name, found, files) for name, found in by_type.items()}
    except _NotAllValidError:
        return None


def _shapes(content: bytes, starts: np.ndarray, ends: np.ndarray) -> Iterator[_Found]:
    """All lines, those of one shape together. Raises _NotAllValidError."""
    lengths = np.minimum(ends - starts, _LONGEST + 1).astype(np.uint16)
    order = np.argsort(lengths, kind="stable")
    for places in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1) if len(order) else []:
        if lengths[places[0]] <= _LONGEST:
            width = MARGIN + -(-int(lengths[places[0]]) // 8) * 8
            from_each_byte = np.ndarray(len(content) - width, f"V{width}", content, strides=(1,))
            rows = from_each_byte[starts[places] - MARGIN].view(np.uint8).reshape(-1, width)
            for _ in range(_MOST_SHAPES):
                line = content[starts[places[0]] : ends[places[0]]]
                record = _record(line)
                shape = shape_of(line, record, width) or Shape.of_one(record)
                is_it = shape.matches(rows)
                if is_it.all():
                    yield _Found(shape, places, rows)
                    places = places[:0]
                    break
                yield _Found(shape, places[is_it], rows[is_it])
                places, rows = places[~is_it], rows[~is_it]
        for place in places.tolist():
            record = _record(content[starts[place] : ends[place]])
            yield _Found(Shape.of_one(record), np.array([place]), np.empty((1, 0), np.uint8))


def _record(line: bytes) -> dict[str, Any]:
    """The record that a line holds. Raises _NotAllValidError if it is none that can be used."""
    try:
        record = parse_json(line)
    except ValueError:
        raise _NotAllValidError from None
    if not isinstance(record, dict) or check_record(record) or type_of(record) not in TYPE_SCHEMAS:
        raise _NotAllValidError
    return record


def _frame(record_type: str, found: list[_Found], files: np.ndarray) -> pl.DataFrame:
    """The records of one type in the order of their lines. Raises _NotAllValidError."""
    schema = TYPE_SCHEMAS[record_type]
    if not found:
        return pl.DataFrame(schema=schema | {FILE: pl.Int32(), LINE: pl.UInt32()})
    places = np.concatenate([one.places for one in found])
    row_of_line = np.full(len(files), -1)
    row_of_line[places] = np.arange(len(places))
    order = pl.Series(row_of_line[row_of_line >= 0].astype(np.uint32))
    columns = [pl.Series(FILE, files[places], pl.Int32), pl.Series(LINE, places, pl.UInt32)]
    for name, field in RECORD_FIELDS[record_type].items():
        if field.json_type == "int":
            columns.append(_integers(name, found))
        elif name != "type":
            columns.append(_values(name, found, schema[name]))
    frame = pl.DataFrame(columns)[order]
    if not _are_possible(frame):
        raise _NotAllValidError
    return frame.select(*schema, FILE, LINE)


def _are_possible(frame: pl.DataFrame) -> bool:
    """Whether no record ends before it starts, or spends longer than that in its phase."""
    if not {"start_ns", "end_ns"} <= set(frame.columns):
        return True
    window = frame["end_ns"] - frame["start_ns"]
    return not (window < 0).any() and not ("duration_ns" in frame.columns and (frame["duration_ns"] > window).any())


def _integers(name: str, found: list[_Found]) -> pl.Series:
    """An int of every line, null where it has none."""
    low, high = int_range(name)
    height = sum(len(one.places) for one in found)
    values, there = np.zeros(height, np.int64), np.ones(height, np.bool_)
    end = 0
    for one in found:
        begin, end = end, end + len(one.places)
        slot, value = one.shape.slots.get(name), one.shape.record.get(name)
        if slot is not None:
            numbers = slot.integers(one.rows)
            leading_zero = slot.stop - slot.start > 1 and (one.rows[:, slot.start] == ord("0")).any()
            if leading_zero or numbers.min() < max(low, 0) or numbers.max() > high:
                raise _NotAllValidError
            values[begin:end] = numbers
        elif value is not None:
            values[begin:end] = value
        else:
            there[begin:end] = False
    if there.all():
        return pl.Series(name, values)
    return pl.select(pl.when(pl.Series(there)).then(pl.Series(values)).alias(name)).to_series()


def _values(name: str, found: list[_Found], kind: pl.DataType) -> pl.Series:
    """A value of every line, null where it has none, of a field that is no int: equal ones are made once."""
    different: list[Any] = [None]
    parts = []
    for one in found:
        slot, value = one.shape.slots.get(name), one.shape.record.get(name)
        if slot is not None:
            places, rows = slot.distinct(one.rows)
            parts.append(places + len(different))
            different += _decoded(kind, slot, one.rows[rows])
        elif value is not None:
            parts.append(np.full(len(one.places), len(different)))
            different.append(json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else value)
        else:
            parts.append(np.zeros(len(one.places), np.int64))
    values = pl.Series(name, different, dtype=pl.String if isinstance(kind, (pl.Enum, pl.Categorical)) else kind)
    values = values.cast(kind, strict=False)  # a word that there is none of is null
    if values.null_count() > 1 or (name in _OBJECTS and not _are_objects(name, values)):
        raise _NotAllValidError
    return values[pl.Series(np.concatenate(parts).astype(np.uint32))]


def _decoded(kind: pl.DataType, slot: Slot, rows: Rows) -> list[Any]:
    """The texts, floats or objects (as text) that stand in a slot."""
    try:
        texts = slot.texts(rows)
    except UnicodeDecodeError:
        raise _NotAllValidError from None
    if kind != pl.Float64:
        return texts
    if not _NUMBERS.fullmatch("\n".join([*texts, ""])):
        raise _NotAllValidError
    floats = [float(text) for text in texts]
    if not all(abs(number) < 1e300 for number in floats):
        raise _NotAllValidError
    return floats


def _are_objects(name: str, values: pl.Series) -> bool:
    """Whether all are objects of numbers, without a key given twice."""
    keys = values.str.extract_all(_KEY).list
    valid = values.str.contains(_OBJECTS[name]) & (keys.n_unique() == keys.len())
    return bool(valid.all())
