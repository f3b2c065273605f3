"""The fast reader: files in which nothing is wrong, as nearly all are, decoded together into columns.

Where something is wrong it gives None and does not say what: `fallback` finds out, line by line.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import polars as pl

from restart_trace.schema import RECORD_FIELDS, SPAN, WORDS, int_range

from ..common.names import FILE, LINE, NAME, OPERATION, TYPE_SCHEMAS
from .files import FileText
from .misread import is_misread

Frames = dict[str, pl.DataFrame]  # record type -> its columns, file_index and line, in the order of the files

_NEWLINE = ord("\n")
_TYPED = b'{"type":"'
# What a line begins with, of every type but spans, which do not name theirs.
_BEGINNINGS = {name: b'%b%b",' % (_TYPED, name.encode()) for name in TYPE_SCHEMAS if name != SPAN}
_LONGEST = max(map(len, _BEGINNINGS.values()))
# An object of numbers, as JSON text: what a probe sampled.
_NUMBER = r"-?[0-9]{1,300}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?"
_PAIR = rf'"(?:[^"\\]|\\.)*": ?{_NUMBER}'
_NUMBERS = rf"^\{{(?:{_PAIR}(?:, ?{_PAIR})*)?\}}$"


@dataclass(frozen=True)
class _Lines:
    """The lines of one type: their text, the file of each, and its place among all lines of the batch."""

    text: bytes
    files: np.ndarray
    places: np.ndarray


def read_columns(texts: list[FileText]) -> Frames | None:
    """Frames of the files' records after the first; None if a line is no valid record."""
    split = _split(texts)
    if split is None:
        return None
    frames: Frames = {}
    # Each type apart, for each further column costs time with every line.
    for name in TYPE_SCHEMAS:
        frame = _decode(name, split[name])
        if frame is None:
            return None
        frames[name] = frame
    return frames


def _split(texts: list[FileText]) -> dict[str, _Lines] | None:
    """The lines of each record type; None if a line has no known type."""
    whole = b"".join([*(memoryview(text.content)[text.start :] for text in texts), bytes(_LONGEST)])
    content = np.frombuffer(whole, np.uint8)
    ends = np.flatnonzero(content == _NEWLINE) + 1
    starts = np.concatenate([[0], ends])[:-1]
    types = _types(content, starts)
    if types is None:
        return None
    last = np.searchsorted(ends, np.cumsum([len(text.content) - text.start for text in texts]), "right")
    files = np.repeat(np.array([text.index for text in texts], np.int32), np.diff(last, prepend=0))
    # Neighbouring lines of one type are cut out at once.
    first = np.flatnonzero(np.diff(types, prepend=-1))
    begins, kinds = starts[first], types[first]
    finishes = np.append(begins[1:], len(whole) - _LONGEST)
    split = {}
    for kind, name in enumerate(TYPE_SCHEMAS):
        runs = zip(begins[kinds == kind].tolist(), finishes[kinds == kind].tolist(), strict=True)
        places = np.flatnonzero(types == kind)
        # The blank line first, which is passed over: polars would unpack what begins as gzip or zstd do.
        text = b"".join([b"\n", *[whole[begin:finish] for begin, finish in runs]])
        split[name] = _Lines(text, files[places], places)
    return split


def _types(content: np.ndarray, starts: np.ndarray) -> np.ndarray | None:
    """Of each line the place of its type in TYPE_SCHEMAS; None if one names another type."""
    names = list(TYPE_SCHEMAS)
    types = np.full(len(starts), names.index(SPAN), np.int8)
    typed = np.flatnonzero(content[starts + _TYPED.index(b"t")] == ord("t"))
    heads = np.lib.stride_tricks.sliding_window_view(content, _LONGEST)[starts[typed]]
    for name, beginning in _BEGINNINGS.items():
        is_it = (heads[:, : len(beginning)] == np.frombuffer(beginning, np.uint8)).all(axis=1)
        types[typed[is_it]] = names.index(name)
        typed, heads = typed[~is_it], heads[~is_it]
    return None if len(typed) else types


def _decode(name: str, lines: _Lines) -> pl.DataFrame | None:
    """The records of one type with file_index and line; None if one of them is not valid."""
    schema = TYPE_SCHEMAS[name]
    origin = [pl.Series(FILE, lines.files, pl.Int32), pl.Series(LINE, lines.places, pl.UInt32)]
    if not len(lines.places):
        return with_words(name, pl.DataFrame(schema=schema).with_columns(origin))
    try:
        frame = pl.read_ndjson(lines.text, schema=schema)
    except pl.exceptions.ComputeError:
        return None
    # Words are looked up: what is no text is no word. In events, phase and detail are free text.
    words = {*WORDS, "phase", "detail"} if name == SPAN else set(WORDS)
    # Polars passes over blank lines, too.
    if frame.height != len(lines.places) or is_misread(name, frame, lines.text, words):
        return None
    cast = with_words(name, frame)
    if not cast.select(_possible(name).all()).item() or (
        # A word that is no detail is not the same as none.
        name == SPAN and cast["detail"].null_count() != frame["detail"].null_count()
    ):
        return None
    return cast.with_columns(origin)


def with_words(record_type: str, frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with the words that many records repeat as small types; a word that there is none of is null."""
    if record_type == SPAN:
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
