"""A trace as OpenTelemetry spans in a file of OTLP/JSON: one OpenTelemetry trace per cycle, over all its ranks.

A process is a resource, and each operation, phase and step of it a span; other records are events of a span. Attributes
hold every field of a record, so that `imported/otlp.py` gets the records back. docs/opentelemetry.md has the names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from restart_trace.regular import read_regular
from restart_trace.schema import CYCLE_FILE_PATTERN, RECORD_FIELDS, SCHEMA_VERSION, SPAN, type_of

from ..common.errors import CouldNotRunError
from ..common.otlp import (
    CLAIM,
    END_LINE,
    END_PREFIX,
    FILE,
    LINE,
    OFFSET_NS,
    PREFIX,
    PROCESS,
    TYPE,
    attributes,
    identifier,
)  # fmt: skip
from ..ingest.clocks import clock_of, offsets_ns
from ..ingest.discover import TraceFile, list_trace
from ..ingest.lines import parse_json, valid_records

GOODPUT = "is_goodput_span"
CYCLE_SPAN, PROCESS_SPAN, SUPERVISOR_SPAN = "nvrx.ft.cycle", "restart_trace.process", "restart_trace.supervisor"
# (operation, phase, detail) -> NVIDIA's name for the same; the phase of an operation itself is "".
NVIDIA_NAMES = {
    ("startup", "", ""): "megatron.startup",
    ("startup", "process_start", ""): "python.startup",
    ("startup", "imports", ""): "python.imports",
    ("startup", "model_build", ""): "megatron.startup.model_init",
    ("startup", "data_build", ""): "megatron.startup.dataloader",
    ("startup", "first_step", ""): "megatron.train.first_iteration",
    ("save", "", ""): "megatron.checkpoint.exposed_save",  # of a save that blocked training from begin to end
    ("save", "collect", ""): "megatron.checkpoint.save.state_dict",
    ("save", "flush", "write"): "megatron.checkpoint.save.io_write",
    ("save", "commit", "manifest"): "megatron.checkpoint.save.finalize",
    ("load", "load", "read"): "megatron.checkpoint.load.io_read",
}
ITERATION_SPAN, FAULT_EVENT = "megatron.train.iteration", "nvrx.ft.fault"
_TIMES = ("start_ns", "end_ns", "time_ns")
_SERVER_ERROR, _INTERNAL = 2, 1  # STATUS_CODE_ERROR, SPAN_KIND_INTERNAL

Records = Sequence[tuple[int, dict[str, Any]]]


@dataclass
class Written:
    """How many spans a file has, and how many lines of the trace could not be used."""

    spans: int = 0
    unusable_lines: int = 0


@dataclass
class _Cycle:
    """An OpenTelemetry trace: its ids, and from when to when it lasts, Unix ns."""

    run_id: str
    number: int
    moments: list[int] = field(default_factory=list)

    @property
    def trace_id(self) -> str:
        return identifier(16, self.run_id, self.number)

    @property
    def root(self) -> str:
        return identifier(8, self.run_id, self.number, "cycle")


@dataclass(frozen=True)
class _File:
    """The records of one file, on the clock of all: `offset_ns` is Unix time minus its monotonic time."""

    name: str
    records: Records
    offset_ns: int

    @property
    def process(self) -> dict[str, Any]:
        return self.records[0][1]

    def span_id(self, line: int) -> str:
        return identifier(8, self.process["run_id"], self.name, line)

    def last_ns(self, records: Records) -> int:
        """The last moment of these records; the start of the process if they have none."""
        moments = [record[name] for _, record in records for name in _TIMES if name in record]
        return max(moments, default=self.process["process_start_ns"]) + self.offset_ns


def write_otlp(stream: TextIO, directory: Path, run_id: str, advance: Callable[[int], object]) -> Written:
    """Write the run as one TracesData per line: a line per process, at the end one with the spans of the cycles.

    Raises CouldNotRunError if a cycle_CCC.json has a number that exceeds 64 bits.
    """
    files, written = _read(directory, run_id)
    cycles: dict[int, _Cycle] = {}
    for file in files:
        spans = [*(_rank_spans if file.process["role"] == "rank" else _supervisor_spans)(file, cycles)]
        _write(stream, _resource(file), spans, written)
        advance(len(file.records))
    holding = list_trace(directory).directory
    roots = [_cycle_span(cycle, holding) for _, cycle in sorted(cycles.items())]
    _write(stream, {"service.name": "restart_trace"}, roots, written)
    return written


def _read(directory: Path, run_id: str) -> tuple[list[_File], Written]:
    written = Written()
    found: list[tuple[TraceFile, Records]] = []
    for file in list_trace(directory).files:
        records, unusable = valid_records(file)
        if records and records[0][1]["run_id"] == run_id:
            written.unusable_lines += unusable
            found.append((file, records))
    offsets = offsets_ns([records[0][1] for _, records in found])
    return [_File(file.path.name, records, offsets[clock_of(records[0][1])]) for file, records in found], written


def _resource(file: _File) -> dict[str, Any]:
    process = file.process
    return {
        "service.name": "restart_trace",
        "service.instance.id": f"{process['run_id']}/{file.name}",
        "host.name": process["host"],
        "process.pid": process["pid"],
        FILE: file.name,
        OFFSET_NS: file.offset_ns,
        PROCESS: {name: value for name, value in process.items() if name in RECORD_FIELDS["process"]},
    }


def _write(stream: TextIO, resource: dict[str, Any], spans: list[dict[str, Any]], written: Written) -> None:
    scope = {"name": "restart_trace", "version": str(SCHEMA_VERSION)}
    entry = {"resource": {"attributes": attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
    stream.write(json.dumps({"resourceSpans": [entry]}, separators=(",", ":"), allow_nan=False) + "\n")
    written.spans += len(spans)


def _span(
    cycle: _Cycle, span_id: str, parent: str, name: str, window: tuple[int, int], held: dict[str, Any],
    events: Sequence[dict[str, Any]] = (), error: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A span from `window[0]` to `window[1]`, Unix ns."""
    cycle.moments += window
    span: dict[str, Any] = {"traceId": cycle.trace_id, "spanId": span_id}
    if parent:
        span["parentSpanId"] = parent
    span |= {"name": name, "kind": _INTERNAL, "startTimeUnixNano": str(window[0]), "endTimeUnixNano": str(window[1])}
    span |= {"attributes": attributes(held), "events": [*events]}
    return span if error is None else span | {"status": {"code": _SERVER_ERROR, "message": error}}


def _held(line: int, record: dict[str, Any], *, without: Sequence[str] = _TIMES) -> dict[str, Any]:
    """The attributes of a record: all fields that are not in the span's own times."""
    fields = {f"{PREFIX}{name}": value for name, value in record.items() if name not in without and name != "type"}
    return {TYPE: type_of(record), LINE: line} | fields


def _event(file: _File, line: int, record: dict[str, Any], otherwise_ns: int) -> dict[str, Any]:
    time_ns = record["time_ns"] + file.offset_ns if "time_ns" in record else otherwise_ns
    name = record["phase"] if record["type"] == "event" else record["type"]
    if (record.get("operation"), name) == ("failure", "detected"):
        name = FAULT_EVENT
    return {"timeUnixNano": str(time_ns), "name": name, "attributes": attributes(_held(line, record))}


def _rank_spans(file: _File, cycles: dict[int, _Cycle]) -> Iterator[dict[str, Any]]:
    """The spans of one rank's file; what has no span of its own is an event of its operation, or of the process."""
    cycle = cycles.setdefault(file.process["cycle"], _Cycle(file.process["run_id"], file.process["cycle"]))
    process_span = file.span_id(1)
    start_ns = file.process["process_start_ns"] + file.offset_ns
    by_op: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    events = []
    for line, record in file.records[1:]:
        if "op" in record:
            by_op.setdefault(record["op"], []).append((line, record))
        elif record["type"] == "iteration":
            held = _held(line, record) | {"megatron.iteration": record["step"], GOODPUT: False}
            yield _span(cycle, file.span_id(line), process_span, ITERATION_SPAN, _window(file, record), held)
        else:
            events.append(_event(file, line, record, start_ns))
    end_ns = file.last_ns(file.records)
    held = {"nvrx.cycle": cycle.number, "nvrx.rank": file.process["rank"]}
    yield _span(cycle, process_span, cycle.root, PROCESS_SPAN, (start_ns, max(start_ns, end_ns)), held, events)
    for records in by_op.values():
        yield from _operation_spans(file, cycle, process_span, records)


def _operation_spans(file: _File, cycle: _Cycle, parent: str, records: Records) -> Iterator[dict[str, Any]]:
    (first_line, begun), *others = records
    own, operation = file.span_id(first_line), begun["operation"]
    held, events, error, end_ns, blocks = _held(first_line, begun), [], None, None, True
    for line, record in others:
        kind = type_of(record)
        if kind == SPAN:
            is_blocking = record.get("blocking", True)
            blocks &= is_blocking
            name = _name(operation, record["phase"], record.get("detail", ""))
            more = _held(line, record) | {GOODPUT: is_blocking}
            yield _span(cycle, file.span_id(line), own, name, _window(file, record), more, error=record.get("error"))
        elif kind == "operation_end":
            fields = {name: value for name, value in record.items() if name not in (*_TIMES, "type", "op")}
            held |= {END_LINE: line} | {f"{END_PREFIX}{name}": value for name, value in fields.items()}
            error, end_ns = record.get("error"), record["end_ns"] + file.offset_ns
        else:
            events.append(_event(file, line, record, begun["start_ns"] + file.offset_ns))
    start_ns = begun["start_ns"] + file.offset_ns
    window = (start_ns, max(start_ns, file.last_ns(records) if end_ns is None else end_ns))
    name = _name(operation) if blocks else f"{PREFIX}{operation}"
    yield _span(cycle, own, parent, name, window, held | {GOODPUT: blocks}, events, error)


def _supervisor_spans(file: _File, cycles: dict[int, _Cycle]) -> Iterator[dict[str, Any]]:
    """A span per restart that the supervisor saw, in the trace of the cycle that it started, with its events."""
    of_cycle: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for line, record in file.records[1:]:
        of_cycle.setdefault(record.get("cycle", file.process["cycle"]) + 1, []).append((line, record))
    for number, records in of_cycle.items():
        cycle = cycles.setdefault(number, _Cycle(file.process["run_id"], number))
        events = [_event(file, line, record, 0) for line, record in records]
        moments = [int(event["timeUnixNano"]) for event in events]
        held = {"nvrx.cycle": number, GOODPUT: True}
        span_id = file.span_id(records[0][0])
        yield _span(cycle, span_id, cycle.root, SUPERVISOR_SPAN, (min(moments), max(moments)), held, events)


def _cycle_span(cycle: _Cycle, directory: Path) -> dict[str, Any]:
    """The span over all of a cycle, which begins with the failure before it if a supervisor saw one."""
    held: dict[str, Any] = {"nvrx.cycle": cycle.number, f"{PREFIX}run_id": cycle.run_id}
    path = directory / CYCLE_FILE_PATTERN.format(cycle=cycle.number)
    try:
        claim = parse_json(read_regular(path))
    except (OSError, ValueError):
        claim = None
    if isinstance(claim, dict):
        held[CLAIM] = claim
    try:
        return _span(cycle, cycle.root, "", CYCLE_SPAN, (min(cycle.moments), max(cycle.moments)), held)
    except (ValueError, RecursionError) as exc:
        raise CouldNotRunError(f"{path}: OTLP cannot hold its content ({exc}): correct or remove the file") from None


def _window(file: _File, record: dict[str, Any]) -> tuple[int, int]:
    return record["start_ns"] + file.offset_ns, record["end_ns"] + file.offset_ns


def _name(operation: str, phase: str = "", detail: str = "") -> str:
    own = ".".join(part for part in (operation, phase, detail) if part)
    return NVIDIA_NAMES.get((operation, phase, detail), f"{PREFIX}{own}")
