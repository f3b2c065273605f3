"""The text of record files to one frame of records, and what of it is no record.

Files are decoded together by polars with an explicit schema. Where that fails, the set is halved until the
damaged file stands alone, and it alone is read line by line: one bad line costs a line, not a file.
"""

from __future__ import annotations

import polars as pl

from ..common.names import COLUMN_TYPES, FILE, SCHEMA
from ..common.problems import Problem
from .batches import FileText
from .lines import decode_lines
from .misread import is_misread

NAMED_FAULTS = 3  # how many bad lines of a file are described; all are counted


def decode(texts: list[FileText]) -> tuple[pl.DataFrame, list[Problem]]:
    """Records of the files, in their order, with the column `file_index`."""
    problems: list[Problem] = []
    frames = _together([text for text in texts if text.body], problems)
    return pl.concat([_no_records(), *frames]), problems


def torn_line(text: FileText) -> Problem:
    """The problem of a file whose last line was cut short."""
    assert text.torn is not None
    message = f"{text.name}: the last line ({text.torn.number}) is {text.torn.reason} and was left out"
    return Problem("torn_line", message, {"file": text.name, "line": text.torn.number})


def describe_invalid(name: str, count: int, reasons: list[str]) -> Problem:
    """The problem of a file some of whose lines are no records or records that cannot be."""
    more = f" and {count - len(reasons)} more" if count > len(reasons) else ""
    message = f"{name}: {count} invalid record{'s' * (count > 1)} left out ({'; '.join(reasons)}{more})"
    return Problem("invalid_record", message, {"file": name, "count": count})


def _together(texts: list[FileText], problems: list[Problem]) -> list[pl.DataFrame]:
    if not texts:
        return []
    try:
        # The blank line first, which is passed over: polars would unpack what begins as gzip or zstd do.
        body = b"\n" + b"".join(text.body for text in texts)
        frame = pl.read_ndjson(body, schema=SCHEMA)
        if is_misread(frame, body):
            frame = None
    except pl.exceptions.ComputeError:
        frame = None
    # Every line is a record, or the rows cannot be told apart by file: polars passes over blank lines.
    if frame is not None and frame.height == sum(text.lines for text in texts):
        counts = pl.DataFrame(
            {FILE: [text.index for text in texts], "lines": [text.lines for text in texts]},
            schema={FILE: pl.Int32, "lines": pl.UInt32},
        )
        return [frame.with_columns(counts.select(pl.col(FILE).repeat_by("lines").explode()).to_series())]
    if len(texts) == 1:
        return [_line_by_line(texts[0], problems)]
    middle = len(texts) // 2
    return _together(texts[:middle], problems) + _together(texts[middle:], problems)


def _line_by_line(text: FileText, problems: list[Problem]) -> pl.DataFrame:
    records, faults = decode_lines(text.body, COLUMN_TYPES)
    if faults:
        reasons = [f"line {fault.number}: {fault.reason}" for fault in faults[:NAMED_FAULTS]]
        problems.append(describe_invalid(text.name, len(faults), reasons))
    frame = pl.DataFrame(records, schema=SCHEMA)
    return frame.with_columns(pl.lit(text.index, dtype=pl.Int32()).alias(FILE))


def _no_records() -> pl.DataFrame:
    return pl.DataFrame(schema=SCHEMA | {FILE: pl.Int32()})
