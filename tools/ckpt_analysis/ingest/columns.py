"""The fast reader: files in which nothing is wrong, as nearly all are, decoded together into columns.

Where something is wrong it gives None and does not say what: `fallback` finds out, line by line.
"""

from __future__ import annotations

import functools

import polars as pl

from restart_trace.schema import RECORD_FIELDS, WORDS, int_range

from ..common.names import FILE, NAME, OPERATION, RECORD_TYPE, SCHEMA, TYPE_SCHEMAS
from .files import FileText
from .misread import is_misread

Frames = dict[str, pl.DataFrame]  # record type -> its columns and file_index, in the order of the files

# An object of numbers, as JSON text: what a probe sampled.
_NUMBER = r"-?[0-9]{1,300}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?"
_PAIR = rf'"(?:[^"\\]|\\.)*": ?{_NUMBER}'
_NUMBERS = rf"^\{{(?:{_PAIR}(?:, ?{_PAIR})*)?\}}$"


def read_columns(texts: list[FileText]) -> Frames | None:
    """Frames of the files' records after the first; None if a line is no valid record."""
    # The blank line first, which is passed over: polars would unpack what begins as gzip or zstd do.
    body = b"\n" + b"".join(text.body for text in texts)
    lines = sum(text.lines for text in texts)
    try:
        frame = pl.read_ndjson(body, schema=SCHEMA) if lines else pl.DataFrame(schema=SCHEMA)
    except pl.exceptions.ComputeError:
        return None
    if frame.height != lines or is_misread(frame, body):  # polars passes over blank lines, too
        return None
    counts = pl.DataFrame(
        {FILE: [text.index for text in texts], "lines": [text.lines for text in texts]},
        schema={FILE: pl.Int32, "lines": pl.UInt32},
    )
    files = counts.select(pl.col(FILE).repeat_by("lines").explode()).to_series().drop_nulls()
    frames = by_type(frame.with_columns(files))
    if frames is None or not all(
        frame.select(_possible(name).all()).item() for name, frame in frames.items()
    ):
        return None
    return frames


def by_type(frame: pl.DataFrame) -> Frames | None:
    """Records parted by their type, the words that many repeat as small types; None if one is of no known word."""
    kind = frame["type"].cast(RECORD_TYPE, strict=False)
    if kind.has_nulls() or (kind == "process").any():
        return None
    is_span = kind == "span"
    rest, rest_kind = frame.filter(~is_span), kind.filter(~is_span)
    frames = {}
    for name, schema in TYPE_SCHEMAS.items():
        if name == "span":
            frames[name] = frame.select(*schema, FILE).filter(is_span)
        else:
            frames[name] = rest.select(*schema, FILE).filter(rest_kind == name)
    nulls = frames["span"]["detail"].null_count()
    frames["span"] = frames["span"].with_columns(pl.col("phase", "detail").cast(NAME, strict=False))
    frames["operation_begin"] = frames["operation_begin"].with_columns(
        pl.col("operation").cast(OPERATION, strict=False)
    )
    # A word that is no detail is not the same as none.
    return frames if frames["span"]["detail"].null_count() == nulls else None


@functools.cache
def _possible(record_type: str) -> pl.Expr:
    """Whether a record has every required field of its type, each with a value that can be."""
    fields = {
        name: field for name, field in RECORD_FIELDS[record_type].items() if name in TYPE_SCHEMAS[record_type]
    }
    valid = pl.all_horizontal(
        pl.lit(True), *(pl.col(n).is_not_null() for n, f in fields.items() if f.required)
    )
    for name, field in fields.items():
        if field.json_type == "int":
            valid &= pl.col(name).is_between(*int_range(name)).fill_null(True)
        elif field.json_type == "float":
            valid &= pl.col(name).abs().lt(1e300).fill_null(True)
        elif name in WORDS:
            valid &= pl.col(name).cast(pl.String).is_in(WORDS[name])
        elif name == "values":
            valid &= pl.col(name).str.contains(_NUMBERS)
    if "start_ns" in fields and "end_ns" in fields:
        window = pl.col("end_ns") - pl.col("start_ns")
        valid &= window >= 0
        if "duration_ns" in fields:
            valid &= (pl.col("duration_ns") <= window).fill_null(True)
    return valid.fill_null(False)
