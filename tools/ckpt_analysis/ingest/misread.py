"""What polars reads without an error though no record may hold it: null, and in a column of text anything else."""

from __future__ import annotations

import re
from collections.abc import Collection

import polars as pl

# polars makes text of numbers, bools, lists and objects; this is how such text begins.
_NO_TEXT = r"^(?:-?[0-9]|[\[{]|true$|false$)"
# The same as ranges, the second end not included, as texts are sorted; "tru" and "fals" begin few words more.
_NO_TEXT_RANGES = (("-", ":"), ("[", "\\"), ("fals", "falt"), ("tru", "trv"), ("{", "|"))


def is_misread(frame: pl.DataFrame, text: bytes, but: Collection[str] = ()) -> bool:
    """Whether `frame`, decoded from the lines `text`, may hold a value that has not its column's type.

    Fields that no column is for make it true as well, where their values are null. The columns `but` are not looked at.
    """
    if b"null" in text and re.search(rb":\s*null", text):  # the first finds all but few texts free of it, and fast
        return True
    for column in frame.get_columns():
        if column.dtype != pl.String or column.name == "values" or column.name in but:  # values are an object
            continue
        if not _may_hold_no_text(column) or not column.str.contains(_NO_TEXT).any():
            continue
        written = text.count(b'"%s":"' % column.name.encode())  # a tag "5" is text as well: its quotes tell
        if written != len(column) - column.null_count():
            return True
    return False


def _may_hold_no_text(column: pl.Series) -> bool:
    """False if its first and last text in order leave no place for any that _NO_TEXT matches: a quick look."""
    first, last = column.min(), column.max()
    if not isinstance(first, str) or not isinstance(last, str):
        return False  # no text at all
    between = [(low, high) for low, high in _NO_TEXT_RANGES if first < high and low <= last]
    return any(bool(column.is_between(pl.lit(low), pl.lit(high), closed="left").any()) for low, high in between)
