"""What polars reads without an error though no record may hold it: null, and in a column of text anything else."""

from __future__ import annotations

import re

import polars as pl

# polars makes text of numbers, bools, lists and objects; this is how such text begins.
_NO_TEXT = r"^(?:-?[0-9]|[\[{]|true$|false$)"


def is_misread(frame: pl.DataFrame, text: bytes) -> bool:
    """Whether `frame`, decoded from the lines `text`, may hold a value that has not its column's type.

    Fields that no column is for make it true as well, where their values are null.
    """
    if b"null" in text and re.search(rb":\s*null", text):  # the first finds all but few texts free of it, and fast
        return True
    for column in frame.get_columns():
        if column.dtype != pl.String or column.name == "values":  # these are an object
            continue
        if column.str.contains(_NO_TEXT).any():  # a tag "5" is text as well: its quotes tell
            written = text.count(b'"%s":"' % column.name.encode())
            if written != len(column) - column.null_count():
                return True
    return False
