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

_SPAN = b'{"type":"span",'  # as the recorder writes it; a span written otherwise is one of the other lines
# Columns of words, which are looked up: what is no text is no word.
_WORDS = {"type", "phase", "detail", *WORDS}
# An object of numbers, as JSON text: what a probe sampled.
_NUMBER = r"-?[0-9]{1,300}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?"
_PAIR = rf'"(?:[^"\\]|\\.)*": ?{_NUMBER}'
_NUMBERS = rf"^\{{(?:{_PAIR}(?:, ?{_PAIR})*)?\}}$"


def read_columns(texts: list[FileText]) -> Frames | None:
    """Frames of the files' records after the first; None if a line is no valid record."""
    spans, others = _Lines(), _Lines()
    for text in texts:
        lines = text.lines()
        spans.add(text.index, [line for line in lines if line.startswith(_SPAN)])
        others.add(text.index, [line for line in lines if not line.startswith(_SPAN)])
    # Spans apart, as they are most of the lines, and each further column costs time with every line.
    span, other = spans.decode(TYPE_SCHEMAS["span"]), others.decode(SCHEMA)
    frames = None if other is None else by_type(other)
    if span is None or frames is None:
        return None
    details = span["detail"]
    span = span.with_columns(_words("span"))
    if not _same_nulls(details, span["detail"]):
        return None
    if not frames["span"].is_empty():
        span = pl.concat([span, frames["span"]]).sort(FILE, maintain_order=True)
    frames["span"] = span
    valid = all(frame.select(_possible(name).all()).item() for name, frame in frames.items())
    return frames if valid else None


class _Lines:
    """Lines of several files, and how many each has."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._files: list[int] = []
        self._counts: list[int] = []

    def add(self, file: int, lines: list[bytes]) -> None:
        self._lines += lines
        self._files.append(file)
        self._counts.append(len(lines))

    def decode(self, schema: dict[str, pl.DataType]) -> pl.DataFrame | None:
        """The records with file_index; None if a line is none, or has a value of another type than its column."""
        if not self._lines:
            return pl.DataFrame(schema=schema | {FILE: pl.Int32()})
        # The blank line first, which is passed over: polars would unpack what begins as gzip or zstd do.
        text = b"\n".join([b"", *self._lines, b""])
        try:
            frame = pl.read_ndjson(text, schema=schema)
        except pl.exceptions.ComputeError:
            return None
        if frame.height != len(self._lines) or is_misread(
            frame, text, _WORDS
        ):  # polars passes over blank lines, too
            return None
        counts = pl.DataFrame(
            {FILE: self._files, "lines": self._counts}, schema={FILE: pl.Int32(), "lines": pl.UInt32()}
        )
        files = counts.select(pl.col(FILE).repeat_by("lines").explode()).to_series()
        return frame.with_columns(files.drop_nulls())  # of a file without such lines


def by_type(frame: pl.DataFrame) -> Frames | None:
    """Records parted by their type, the words that many repeat as small types; None if one is of no known word."""
    kind = frame["type"].cast(RECORD_TYPE, strict=False)
    if kind.has_nulls() or (kind == "process").any():
        return None
    parted = frame.with_columns(kind).partition_by("type", as_dict=True)
    parts = {name: parted.get((name,), frame.clear()) for name in TYPE_SCHEMAS}
    frames = {
        name: part.select(*TYPE_SCHEMAS[name], FILE).with_columns(_words(name))
        for name, part in parts.items()
    }
    return frames if _same_nulls(parts["span"]["detail"], frames["span"]["detail"]) else None


def _words(record_type: str) -> list[pl.Expr]:
    """Casts that make a word that there is none of a null."""
    if record_type == "span":
        return [pl.col("phase", "detail").cast(NAME, strict=False)]
    return [pl.col("operation").cast(OPERATION, strict=False)] if record_type == "operation_begin" else []


def _same_nulls(written: pl.Series, cast: pl.Series) -> bool:
    """Whether no word was lost: a word that is no detail is not the same as none."""
    return written.null_count() == cast.null_count()


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
