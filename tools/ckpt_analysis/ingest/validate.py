"""Every record of a trace file against the format, line by line: slower than reading, and stricter.

Needs nothing but the standard library, so that its worker processes start at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from restart_trace.regular import read_regular
from restart_trace.schema import SCHEMA_VERSION, check_record

from .head import impossible_ranks, impossible_supervisor
from .lines import parse_json


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a file; `line` is 0 for the file as a whole."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.reason}"


@dataclass(frozen=True)
class Checked:
    """What one file held."""

    records: int
    num_bytes: int
    faults: list[Fault]


def check_file(path: Path, rank: int | None, cycle: int | None) -> Checked:
    """Check a file whose name says `rank` and `cycle` (both None: a supervisor's)."""
    try:
        content = read_regular(path)
    except OSError as exc:
        return Checked(0, 0, [Fault(path.name, 0, str(exc.strerror))])
    if not content:
        return Checked(0, 0, [Fault(path.name, 0, "has no records")])
    lines = content.split(b"\n")
    torn = lines.pop()  # what follows the last newline
    course = _Course(rank, cycle)
    faults: list[Fault] = []
    for number, line in enumerate(lines, start=1):
        faults += [Fault(path.name, number, reason) for reason in _line(line, number, course)]
    if torn:
        faults.append(Fault(path.name, len(lines) + 1, "the last line has no newline: cut short"))
    return Checked(len(lines), len(content), faults + [Fault(path.name, 0, r) for r in course.unfinished()])


class _Course:
    """What one process's records say of each other."""

    def __init__(self, rank: int | None, cycle: int | None) -> None:
        self.rank, self.cycle = rank, cycle
        self.place: dict[str, int] = {}
        self.begun: dict[int, dict[str, Any]] = {}
        self.ended: set[int] = set()

    def check(self, record: dict[str, Any], number: int) -> Iterator[str]:
        """What contradicts the file's name or an earlier record; the record itself is valid."""
        kind = record["type"]
        if (number == 1) != (kind == "process"):
            yield "the first record of a file, and no other, is its process record"
        if kind == "process":
            yield from (impossible_ranks if record["role"] == "rank" else impossible_supervisor)(record)
            self.place = self.place or {name: record[name] for name in ("tp", "pp", "dp")}
        elif any(record[name] != value for name, value in self.place.items()):
            yield f"tp, pp, dp are not those of the process record, {list(self.place.values())}"
        if self.rank is not None and (record["rank"], record["cycle"]) != (self.rank, self.cycle):
            yield f"is of rank {record['rank']}, cycle {record['cycle']}, which the name of the file is not"
        if kind == "operation_begin":
            if record["op_id"] in self.begun:
                yield f"operation {record['op_id']} begins a second time"
            self.begun.setdefault(record["op_id"], record)
        elif kind in ("span", "operation_end"):
            begun = self.begun.get(record["op_id"], {})
            if begun.get("operation") != record["operation"]:
                yield f"{record['operation']} {record['op_id']} has no operation_begin before this"
            elif kind == "operation_end" and begun["start_ns"] != record["start_ns"]:
                yield f"{record['operation']} {record['op_id']} has another start_ns than its operation_begin"
            if kind == "operation_end":
                if record["op_id"] in self.ended:
                    yield f"operation {record['op_id']} ends a second time"
                self.ended.add(record["op_id"])

    def unfinished(self) -> Iterator[str]:
        for op_id, begun in self.begun.items():
            if op_id not in self.ended:
                yield f"{begun['operation']} {op_id} has no operation_end: it was killed, or is still running"


def _line(line: bytes, number: int, course: _Course) -> Iterator[str]:
    try:
        record = parse_json(line)
    except ValueError:  # includes UnicodeDecodeError
        yield "not a JSON record"
        return
    if not isinstance(record, dict):
        yield "not a JSON object"
    elif isinstance(record.get("v"), int) and record["v"] != SCHEMA_VERSION:
        yield f"schema version {record['v']}, not {SCHEMA_VERSION}"
    elif faults := check_record(record):
        yield from faults
    else:
        yield from course.check(record, number)
