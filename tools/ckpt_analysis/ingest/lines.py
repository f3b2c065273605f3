"""Parses trace files line by line: the record of each line, or what is wrong with it. Standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from restart_trace.regular import read_regular
from restart_trace.schema import AXES, READABLE_VERSIONS, RECORD_FIELDS, SPAN, check_phase, check_record, type_of

from .discover import TraceFile

READ = " or ".join(map(str, READABLE_VERSIONS))  # as messages name the versions
MOST_RANKS = 10_000_000  # a hundred times the largest trainings; more is no number that a run had


@dataclass(frozen=True)
class Line:
    """One line of a file: its record, if it has one that can be used, and everything that is wrong.

    `process` is the process record under which it stands, if that is not the first of the file.
    """

    number: int
    record: dict[str, Any] | None
    faults: list[str]
    process: dict[str, Any] | None = None


class _Process:
    """What the records of one process said so far."""

    def __init__(self, record: dict[str, Any] | None) -> None:
        self.record = record
        self.begun: dict[int, dict[str, Any]] = {}
        self.ended: set[int] = set()

    def contradictions(self, record: dict[str, Any]) -> Iterator[str]:
        """What contradicts earlier records; the record by itself is valid."""
        if "op" not in record:
            return
        kind, op_id = type_of(record), record["op"]
        begun = self.begun.get(op_id)
        if kind == "operation_begin":
            if begun is not None:
                yield f"operation {op_id} begins a second time"
            self.begun.setdefault(op_id, record)
        elif begun is None:
            yield f"{kind} of operation {op_id}, which has no operation_begin before this"
        elif kind == SPAN:
            yield from check_phase(begun["operation"], record["phase"], record.get("detail"))
        elif kind == "operation_end":
            if record["end_ns"] < begun["start_ns"]:
                yield f"ends {begun['start_ns'] - record['end_ns']} ns before it starts"
            elif op_id in self.ended:
                yield f"operation {op_id} ends a second time"
            else:
                self.ended.add(op_id)


class LineReader:
    """The lines of one file after its first, in order; `process` is the record of the first."""

    def __init__(self, process: dict[str, Any] | None) -> None:
        self._first = self._current = _Process(process)

    def read(self, line: bytes, number: int) -> Line:
        """What the next line holds. Fields that the format does not have are faults, and left out of the record."""
        try:
            decoded = parse_json(line)
        except ValueError:  # includes UnicodeDecodeError
            return self._line(number, None, ["not a JSON record"])
        if not isinstance(decoded, dict):
            return self._line(number, None, ["not a JSON object"])
        kind = type_of(decoded)
        if kind == "process":
            return self._second_process(decoded, number)
        fields = RECORD_FIELDS.get(kind) if isinstance(kind, str) else None
        record = {name: value for name, value in decoded.items() if fields is None or name in fields}
        wrong = check_record(record)
        if not wrong and self._current is self._first:
            wrong = list(self._current.contradictions(record))
        # What is there and wrong tells more than what is not.
        wrong.sort(key=lambda fault: fault.startswith("missing"))
        unknown = [f"unknown field {name}" for name in decoded if name not in record]
        return self._line(number, None if wrong else record, wrong + unknown)

    def _second_process(self, record: dict[str, Any], number: int) -> Line:
        fault = "the first record of a file, and no other, is its process record"
        if not faults_of_process(record) or other_version(record) is not None:
            self._current = _Process(record)
        elif "pid" in record or "run_id" in record:
            # Damaged, but of a process: what follows is not of the first one. (Else it is another record, altered.)
            self._current = _Process(self._first.record)
        return self._line(number, None, [fault])

    def _line(self, number: int, record: dict[str, Any] | None, faults: list[str]) -> Line:
        if self._current is self._first:
            return Line(number, record, faults)
        return Line(number, None, faults or ["is of a second process: a file belongs to one"], self._current.record)

    def unfinished(self) -> Iterator[str]:
        """Operations without an end, each as a sentence."""
        for op_id, begun in self._first.begun.items():
            if op_id not in self._first.ended:
                yield f"{begun['operation']} {op_id} has no operation_end: it was killed, or is still running"


def process_record(line: bytes, file: TraceFile) -> tuple[dict[str, Any] | None, list[str]]:
    """(record, what is wrong) of the first line of `file`. A record of another version is not looked at."""
    try:
        record = parse_json(line)
    except ValueError:
        return None, ["not a JSON record"]
    if not isinstance(record, dict) or record.get("type") != "process":
        return None, ["the first record of a file, and no other, is its process record"]
    if other_version(record) is not None:
        return record, []
    faults = faults_of_process({name: v for name, v in record.items() if name in RECORD_FIELDS["process"]})
    if not faults and (record["role"] == "rank") != (file.rank is not None):
        faults = [f"field role is not that of the file's name: {record['role']}"]
    return (None if faults else record), faults


def other_version(process: dict[str, Any]) -> int | None:
    """The schema version of a process record if this tool cannot read it; None if it can, or it is no version."""
    version = process.get("v")
    return version if type(version) is int and version not in READABLE_VERSIONS and abs(version) < 1 << 53 else None


def faults_of_process(record: dict[str, Any]) -> list[str]:
    """What is wrong with a process record of a version that this tool reads."""
    faults = check_record(record)
    if faults:
        return faults
    if record["v"] not in READABLE_VERSIONS:
        return [f"field v is no version: {record['v']}"]
    return _impossible_rank(record) if record["role"] == "rank" else _impossible_supervisor(record)


def _impossible_rank(record: dict[str, Any]) -> list[str]:
    """What is wrong with the number of ranks: all of them are expected, so it must not come from a damaged byte."""
    world_size, rank = record["world_size"], record["rank"]
    sizes = {name: record["layout"].get(name, 1) for name in AXES}
    if not {"tp", "pp", "dp"} <= record["layout"].keys() or min(record["layout"].values()) < 1:
        return [f"field layout is no layout: {record['layout']}"]
    # The ranks of expert parallelism are those of dp. Fewer than the product is a share, as ckpt_replay plays.
    if world_size > math.prod(size for name, size in sizes.items() if name != "ep"):
        return [f"field world_size is more than its layout {record['layout']} has: {world_size}"]
    if not 0 <= rank < world_size <= MOST_RANKS:
        return [f"field rank is not from 0 to world_size, of {MOST_RANKS} at most: {rank} of {world_size}"]
    place = {name: record[name] for name in AXES if name in record}
    if not all(0 <= at < sizes[name] for name, at in place.items()):
        return [f"fields {', '.join(place)} are no place in its layout {record['layout']}: {list(place.values())}"]
    return []


def placed(process: dict[str, Any], line: bytes) -> dict[str, Any]:
    """The process record with the place that a coordinates record gives its rank; as it is if that is no place."""
    try:
        found = parse_json(line)
    except ValueError:
        return process
    if not isinstance(found, dict) or check_record(found):
        return process
    moved = {name: value for name, value in process.items() if name not in AXES} | found | {"type": "process"}
    return process if faults_of_process(moved) else moved


def _impossible_supervisor(record: dict[str, Any]) -> list[str]:
    """What is wrong with a supervisor's process record: it is no rank."""
    place = [record[name] for name in ("rank", "tp", "pp", "dp")]
    return [] if place == [-1] * 4 else [f"fields rank, tp, pp, dp of a supervisor are not -1: {place}"]


def parse_json(line: bytes) -> Any:
    """What a line holds. Raises ValueError if it is no JSON, nested deeper than any record is, or gives a key twice.

    NaN is no JSON.
    """
    try:
        decoded = _DECODER.decode(line.decode(json.detect_encoding(line), "surrogatepass"))
        if b"\\ud" not in line.lower():
            return decoded
        # JSON's escapes can name halves of characters, as of a file name that is not UTF-8: nothing could print them.
        return json.loads(json.dumps(decoded, ensure_ascii=False).encode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is given twice")
    return found


# json.loads would make one for each line.
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse)


class RecordStream:
    """The records of `file` that can be used, from its bytes as they come; without a valid process record, none can.

    `process` is that record once its line is complete, or `fault` says what is wrong with it. `unusable` counts the
    complete lines that cannot be used.
    """

    def __init__(self, file: TraceFile) -> None:
        self.process: dict[str, Any] | None = None
        self.fault = ""
        self.unusable = 0
        self.torn = b""  # what follows the last newline so far
        self._file = file
        self._lines = 0
        self._reader: LineReader | None = None

    def feed(self, data: bytes) -> list[tuple[int, dict[str, Any]]]:
        """(line number, record) of the lines that end in `data`, the process record first."""
        *lines, self.torn = (self.torn + data).split(b"\n")
        found: list[tuple[int, dict[str, Any]]] = []
        for line in lines:
            self._lines += 1
            record = self._read_first(line) if self._lines == 1 else self._read(line)
            if record is None:
                self.unusable += 1
            else:
                found.append((self._lines, record))
        return found

    def _read_first(self, line: bytes) -> dict[str, Any] | None:
        process, faults = process_record(line, self._file)
        if process is None:
            self.fault = faults[0]
        elif (version := other_version(process)) is not None:
            self.fault = f"has schema version {version}; this tool reads version {READ}"
        else:
            self.process, self._reader = process, LineReader(process)
        return self.process

    def _read(self, line: bytes) -> dict[str, Any] | None:
        return None if self._reader is None else self._reader.read(line, self._lines).record


def valid_records(file: TraceFile) -> tuple[list[tuple[int, dict[str, Any]]], int]:
    """(line number, record) of the lines of `file` that can be used, its process record first; and how many cannot.

    Without a process record of a version that this tool reads, none can. Raises OSError if the file cannot be read.
    """
    stream = RecordStream(file)
    found = stream.feed(read_regular(file.path))
    return found, stream.unusable + bool(stream.torn)
