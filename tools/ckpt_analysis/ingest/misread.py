"""What polars reads without an error though no record may hold it.

That is null, a field that the format does not have, a field given twice, and in a column of text anything else.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import polars as pl

from restart_trace.schema import RECORD_FIELDS

# polars makes text of numbers, bools, lists and objects; this is how such text begins.
_NO_TEXT = r"^(?:-?[0-9]|[\[{]|true$|false$)"
# The same as ranges, the second end not included, as texts are sorted; "tru" and "fals" begin few words more.
_NO_TEXT_RANGES = (("-", ":"), ("[", "\\"), ("fals", "falt"), ("tru", "trv"), ("{", "|"))
_QUOTE = ord('"')


def is_misread(record_type: str, frame: pl.DataFrame, text: bytes, but: Collection[str] = ()) -> bool:
    """Whether `frame`, decoded from the lines `text`, may not be all that they say, or say it of another type.

    Of the columns `but` it is not looked at whether their values are text: the caller does.
    """
    for column in frame.get_columns():
        if RECORD_FIELDS[record_type][column.name].json_type != "str" or column.name in but:
            continue
        if not _may_hold_no_text(column) or not column.str.contains(_NO_TEXT).any():
            continue
        written = text.count(b'"%s":"' % column.name.encode())  # a tag "5" is text as well: its quotes tell
        if written != len(column) - column.null_count():
            return True
    return _quotes(text) != _quotes_expected(record_type, frame)


def _quotes(text: bytes) -> int:
    """Quotes that are part of the syntax: those of keys and around texts."""
    quotes = int(np.count_nonzero(np.frombuffer(text, np.uint8) == _QUOTE))
    return quotes - text.count(b'\\"') if b"\\" in text else quotes


def _quotes_expected(record_type: str, frame: pl.DataFrame) -> int:
    """Quotes of lines that say what the columns hold, each field once, and nothing else."""
    quotes = 0
    for name, field in RECORD_FIELDS[record_type].items():
        if name in frame.columns:
            column = frame[name]
            quotes += (len(column) - column.null_count()) * (4 if field.json_type == "str" else 2)
            if field.json_type == "object":
                quotes += int(column.str.count_matches('"', literal=True).sum())
        elif field.required:  # "type", and what no column is for
            quotes += frame.height * (4 if field.json_type == "str" else 2)
    return quotes


def _may_hold_no_text(column: pl.Series) -> bool:
    """False if its first and last text in order leave no place for any that _NO_TEXT matches: a quick look."""
    first, last = column.min(), column.max()
    if not isinstance(first, str) or not isinstance(last, str):
        return False  # no text at all
    between = [(low, high) for low, high in _NO_TEXT_RANGES if first < high and low <= last]
    return any(bool(column.is_between(pl.lit(low), pl.lit(high), closed="left").any()) for low, high in between)
