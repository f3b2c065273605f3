"""The fast reader: files in which nothing is wrong, as nearly all are, decoded together into columns.

Where something is wrong it gives None and does not say what: `fallback` finds out, line by line.
"""

from __future__ import annotations

import functools
import re

import polars as pl

from restart_trace.schema import RECORD_FIELDS, WORDS, int_range

from ..common.names import FILE, NAME, OPERATION, TYPE_SCHEMAS
from .files import FileText
from .misread import is_misread

Frames = dict[str, pl.DataFrame]  # record type -> its columns and file_index, in the order of the files

# Neighbouring lines of one type at a time. Spans first: they are most of the lines.
_RUNS = re.compile(
    b"|".join(
        rb'(?P<%b>(?:\{"type":"%b",[^\n]*\n)+)' % (name.encode(), name.encode())
        for name in ["span", *(name for name in TYPE_SCHEMAS if name != "span")]
    )
)
# An object of numbers, as JSON text: what a probe sampled.
_NUMBER = r"-?[0-9]{1,300}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?"
_PAIR = rf'"(?:[^"\\]|\\.)*": ?{_NUMBER}'
_NUMBERS = rf"^\{{(?:{_PAIR}(?:, ?{_PAIR})*)?\}}$"


def read_columns(texts: list[FileText]) -> Frames | None:
    """Frames of the files' records after the first; None if a line is no valid record."""
    lines = {name: _Lines(name) for name in TYPE_SCHEMAS}
    for text in texts:
        runs: dict[str, list[bytes]] = {name: [] for name in TYPE_SCHEMAS}
        left = len(text.content) - text.start
        for run in _RUNS.finditer(text.content, text.start):
            runs[run.lastgroup or ""].append(run[0])
            left -= len(run[0])
        if left:
            return None
        # Each type apart, for each further column costs time with every line.
        for name, mine in runs.items():
            if mine:
                lines[name].add(text.index, mine)
    frames: Frames = {}
    for name in TYPE_SCHEMAS:
        frame = lines[name].decode()
        if frame is None:
            return None
        frames[name] = frame
    return frames


class _Lines:
    """Lines of one type of several files, and how many each has."""

    def __init__(self, record_type: str) -> None:
        self._type = record_type
        self._runs: list[bytes] = []
        self._files: list[int] = []
        self._counts: list[int] = []

    def add(self, file: int, runs: list[bytes]) -> None:
        self._runs += runs
        self._files.append(file)
        self._counts.append(sum(run.count(b"\n") for run in runs))

    def decode(self) -> pl.DataFrame | None:
        """The records with file_index; None if one of them is not valid."""
        schema = TYPE_SCHEMAS[self._type]
        if not self._runs:
            return with_words(self._type, pl.DataFrame(schema=schema | {FILE: pl.Int32()}))
        # The blank line first, which is passed over: polars would unpack what begins as gzip or zstd do.
        text = b"".join([b"\n", *self._runs])
        try:
            frame = pl.read_ndjson(text, schema=schema)
        except pl.exceptions.ComputeError:
            return None
        # Words are looked up: what is no text is no word. In events, phase and detail are free text.
        words = {*WORDS, "phase", "detail"} if self._type == "span" else set(WORDS)
        # Polars passes over blank lines, too.
        if frame.height != sum(self._counts) or is_misread(frame, text, words):
            return None
        cast = with_words(self._type, frame)
        if not cast.select(_possible(self._type).all()).item() or (
            # A word that is no detail is not the same as none.
            self._type == "span" and cast["detail"].null_count() != frame["detail"].null_count()
        ):
            return None
        counts = pl.DataFrame(
            {FILE: self._files, "lines": self._counts}, schema={FILE: pl.Int32(), "lines": pl.UInt32()}
        )
        return cast.with_columns(counts.select(pl.col(FILE).repeat_by("lines").explode()).to_series())


def with_words(record_type: str, frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with the words that many records repeat as small types; a word that there is none of is null."""
    if record_type == "span":
        return frame.with_columns(pl.col("phase", "detail").cast(NAME, strict=False))
    if record_type == "operation_begin":
        return frame.with_columns(pl.col("operation").cast(OPERATION, strict=False))
    return frame


@functools.cache
def _possible(record_type: str) -> pl.Expr:
    """Whether a record has every required field of its type, each with a value that can be."""
    fields = {name: field for name, field in RECORD_FIELDS[record_type].items() if name in TYPE_SCHEMAS[record_type]}
    valid = pl.all_horizontal(pl.lit(True), *(pl.col(n).is_not_null() for n, f in fields.items() if f.required))
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
