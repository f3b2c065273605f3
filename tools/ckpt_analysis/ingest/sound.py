"""The fast way for batches in which nothing is wrong, as nearly all are.

Every record of a process begins with the same bytes: version, type, and who it is. Lines are sorted by these bytes,
which are then cut off, so that each type is decoded with its own few columns. Where a line is not as expected,
does not decode or is not valid, the whole batch goes the thorough way instead (decode.py, valid.py), which finds
out what is wrong with which line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import polars as pl

from restart_trace.schema import SCHEMA_VERSION

from ..common.names import FILE, NAME, OPERATION, TYPE_SCHEMAS, WHO
from .batches import FileText
from .head import Head
from .misread import is_misread
from .valid import possible

_WHO_FIELDS = {"run_id", "cycle", "rank", "tp", "pp", "dp"}
_START = b'{"v":%d,"type":"' % SCHEMA_VERSION
_AFTER_WHO = b'"role"'  # the first field of a process record that is its own
# Spans first: they are most of the lines, and each further type looks at what is left.
_TYPES = ["span", *(name for name in TYPE_SCHEMAS if name != "span")]


@dataclass
class SortedLines:
    """Lines of some files by type, without what all lines of a file begin with."""

    heads: list[Head] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    lines: dict[str, list[bytes]] = field(default_factory=lambda: {name: [] for name in _TYPES})
    counts: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in _TYPES})


def sort_lines(texts: list[FileText], heads: list[Head]) -> SortedLines | None:
    """None if a line does not begin as those of its file should."""
    found = SortedLines()
    for text in texts:
        head = heads[text.index]
        who = _who(text.body, head)
        if who is None:
            return None
        left = text.body.split(b"\n")
        left = left[1:-1]  # without the process record, and what follows the last newline
        for name in _TYPES:
            start = _START + name.encode() + b'",' + who
            mine = [line[len(start) :] for line in left if line.startswith(start)]
            found.lines[name] += mine
            found.counts[name].append(len(mine))
            if len(mine) == len(left):
                left = []
            elif mine:
                left = [line for line in left if not line.startswith(start)]
        if left:
            return None
        found.heads.append(head)
        found.indices.append(text.index)
    return found


def decode_sorted(found: SortedLines) -> dict[str, pl.DataFrame] | None:
    """A frame per type with the columns of TYPE_SCHEMAS, file_index and but for spans WHO.

    None if a record is not valid.
    """
    processes = [head.process or {} for head in found.heads]
    files = pl.DataFrame(
        {FILE: found.indices} | {name: [process[name] for process in processes] for name in WHO},
        schema={FILE: pl.Int32, "run_id": pl.Categorical, "cycle": pl.Int64, "rank": pl.Int64},
    )
    frames = {}
    for name in TYPE_SCHEMAS:
        frame = _decode(name, found.lines[name])
        if frame is None:
            return None
        counts = pl.Series("n", found.counts[name], dtype=pl.UInt32)
        place = pl.select(pl.int_range(len(counts), dtype=pl.UInt32).repeat_by(counts).explode()).to_series()
        place = place.drop_nulls()  # a file without a line of this type
        # Millions of spans need but the file: the rest is in their operation.
        who = files.select(FILE) if name == "span" else files
        frames[name] = frame.hstack(who[place] if len(place) else who.clear())
    return frames


def _decode(name: str, lines: list[bytes]) -> pl.DataFrame | None:
    """The records of one type; None if one of them is not valid."""
    frame = pl.DataFrame(schema=TYPE_SCHEMAS[name])
    text = b""
    if lines:
        lines[0] = b"{" + lines[0]
        lines[-1] += b"\n"
        text = b"\n{".join(lines)  # megabytes: put together in one copy
        try:
            frame = pl.read_ndjson(text, schema=TYPE_SCHEMAS[name])
        except pl.exceptions.ComputeError:
            return None
    if frame.height != len(lines):  # a blank line would shift the rows against the files
        return None
    if name == "span":
        nulls = frame["detail"].null_count()
        frame = frame.with_columns(
            pl.col("phase", "detail").cast(NAME, strict=False),
            pl.col("operation").cast(OPERATION, strict=False),
        )
        if frame["detail"].null_count() != nulls:  # a word that is no detail is not the same as none
            return None
    if is_misread(frame, text):  # now, as words need no look: what is none of them is null
        return None
    return frame if frame.select(possible(name).all()).item() else None


def _who(body: bytes, head: Head) -> bytes | None:
    """The bytes that say which process a record is of; None if the first record does not show them."""
    start = _START + b'process",'
    process = head.process
    if process is None or not body.startswith(start):
        return None
    if head.file.rank is not None and (process["rank"], process["cycle"]) != (
        head.file.rank,
        head.file.cycle,
    ):
        return None
    who = body[len(start) : body.find(_AFTER_WHO)]
    try:
        fields = json.loads(b"{" + who.removesuffix(b",") + b"}")
    except ValueError:
        return None
    return who if set(fields) == _WHO_FIELDS else None
