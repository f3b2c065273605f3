"""Checkpoints that this run has saved, as its trace tells, and that are gone: read where --save holds none.

A start that finds no checkpoint is the first one of its run, or all that was saved is lost: removed, or on a storage
that is not mounted. Only the trace of earlier cycles tells these apart. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config.uris import is_uri
from restart_trace.cycles import newest_cycle
from restart_trace.reading import read_records
from restart_trace.schema import RANK_FILE_PATTERN


class Committed(NamedTuple):
    """A checkpoint that rank 0 has published, and the trace that tells of it."""

    tag: str
    trace: Path


def last_committed(trace_dir: Path, save: str) -> Committed | None:
    """The last checkpoint that earlier cycles in `trace_dir` have published to `save`; None if the trace tells of none.

    Saves that were kept in host memory alone are none of them. What cannot be read tells of nothing.
    """
    for path in _newest_first(trace_dir):
        try:
            tag = _last_published(read_records(path), save)
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if tag is not None:
            return Committed(tag, path)
    return None


def _newest_first(trace_dir: Path) -> Iterator[Path]:
    """The files of rank 0, which publishes."""
    try:
        newest = newest_cycle(trace_dir)
    except OSError:
        return
    for cycle in range(-1 if newest is None else newest[0], -1, -1):
        yield trace_dir / RANK_FILE_PATTERN.format(rank=0, cycle=cycle)


def _last_published(records: Iterator[dict[str, Any]], save: str) -> str | None:
    """Tag of the last save of a cycle that ended well and was published; None if it saved to another place."""
    here, last, published = False, None, set()
    for record in records:
        kind = record["type"]
        if kind == "runtime":
            here = _same_place(record.get("save_dir"), save)
        elif record.get("operation") == "save" and record.get("detail") == "publish":
            published.add(record["op"])
        elif kind == "operation_end" and record.get("op") in published and record["outcome"] == "ok":
            last = str(record["tag"])
    return last if here else None


def _same_place(one: Any, other: str) -> bool:
    if not isinstance(one, str) or is_uri(one) or is_uri(other):
        return one == other
    return os.path.realpath(one) == os.path.realpath(other)
