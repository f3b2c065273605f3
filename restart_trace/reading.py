"""Completes records with the fields of earlier records of their file, which describe their process and operation.

A file states only once which process it belongs to, and only once what each operation is. Code that reads single
records, such as a supervisor that follows a run or your own script, completes them by `RecordContext`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from restart_trace.regular import read_regular
from restart_trace.schema import MAIN_THREAD, SPAN, type_of

IDENTITY = ("run_id", "cycle", "rank", "tp", "pp", "dp")
LABELS = ("tag", "step", "engine", "tier")


class RecordContext:
    """The process and the operations of one file, as its records so far describe them."""

    def __init__(self) -> None:
        self._identity: dict[str, Any] = {}
        self._operations: dict[int, dict[str, Any]] = {}

    def complete(self, record: dict[str, Any]) -> dict[str, Any]:
        """The next record of the file with the fields that earlier records hold for it.

        Every record gets IDENTITY. A record with an op gets `operation` and LABELS, the end of an operation also
        `start_ns`, and a span the `type`, `duration_ns`, `thread` and `blocking` that it leaves out.
        """
        kind = type_of(record)
        if kind == "process":
            self._identity = {name: record[name] for name in IDENTITY if name in record}
            return record
        if kind == "coordinates":
            self._identity |= {name: record[name] for name in IDENTITY if name in record}
        if "op" not in record:
            return self._identity | record
        operation = self._operations.setdefault(record["op"], {})
        if kind in ("operation_begin", "operation_label"):
            operation |= {name: record[name] for name in ("operation", "start_ns", *LABELS) if name in record}
        completed = self._identity | operation | record
        if kind == SPAN:
            duration_ns = record["end_ns"] - record["start_ns"]
            completed = {"type": SPAN, "duration_ns": duration_ns, "thread": MAIN_THREAD, "blocking": True} | completed
        return completed


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Completed records of a file, without a last line that a kill left incomplete.

    Raises OSError if the file cannot be read, ValueError if another line is not JSON.
    """
    context = RecordContext()
    for line in read_regular(path).split(b"\n")[:-1]:
        yield context.complete(json.loads(line))
