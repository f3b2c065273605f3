"""The OpenTelemetry spans of trace files: one OpenTelemetry trace per cycle, over all its ranks.

A process is a resource, and each operation, phase and step of it a span; other records are events of a span. Attributes
hold every field of a record, so that `imported/otlp.py` gets the records back. docs/opentelemetry.md has the names.

Records come in the order of their file, and each span is made once its end is known: a file that still grows gives the
same spans as a complete one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from restart_trace.regular import read_regular
from restart_trace.schema import CYCLE_FILE_PATTERN, RECORD_FIELDS, SPAN, type_of

from ..common.otlp import CLAIM, END_LINE, END_PREFIX, FILE, LINE, OFFSET_NS, PREFIX, PROCESS, TYPE, identifier
from ..ingest.lines import parse_json

GOODPUT = "is_goodput_span"
CYCLE_SPAN, PROCESS_SPAN, SUPERVISOR_SPAN = "nvrx.ft.cycle", "restart_trace.process", "restart_trace.supervisor"
EVENTS_SPAN = "restart_trace.events"
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
RESOURCE_OF_CYCLES = {"service.name": "restart_trace"}
_TIMES = ("start_ns", "end_ns", "time_ns")
_MOST_EVENTS = 256  # of a process' span: a collector refuses spans of megabytes
_MOST_AFTER_END = 8  # records between the end of an operation and its last sample, of other threads

Record = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """A moment of a span, Unix ns."""

    time_ns: int
    name: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Span:
    """A span from `start_ns` to `end_ns`, Unix ns; its ids are in hex, and `parent` is "" for that of a cycle."""

    trace_id: str
    span_id: str
    parent: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[Event, ...] = ()
    error: str | None = None


@dataclass
class Cycle:
    """An OpenTelemetry trace: its ids, and from when to when its spans last, Unix ns."""

    run_id: str
    number: int
    moments: list[int] = field(default_factory=list)  # the first and the last, once there are spans

    @property
    def trace_id(self) -> str:
        return identifier(16, self.run_id, self.number)

    @property
    def root(self) -> str:
        return identifier(8, self.run_id, self.number, "cycle")

    def span(
        self, span_id: str, parent: str, name: str, window: tuple[int, int], held: dict[str, Any],
        events: Sequence[Event] = (), error: str | None = None,
    ) -> Span:  # fmt: skip
        """A span of this trace."""
        self.moments = [min(*self.moments[:1], window[0], window[1]), max(*self.moments[1:], *window)]
        return Span(self.trace_id, span_id, parent, name, *window, held, tuple(events), error)

    def whole(self, directory: Path) -> Span:
        """The span over all of the cycle, which begins with the failure before it if a supervisor saw one.

        To be called after all other spans of the cycle were made. It holds the claim of the cycle in `directory`.
        """
        held: dict[str, Any] = {"nvrx.cycle": self.number, f"{PREFIX}run_id": self.run_id}
        try:
            claim = parse_json(read_regular(directory / CYCLE_FILE_PATTERN.format(cycle=self.number)))
        except (OSError, ValueError):
            claim = None
        if isinstance(claim, dict):
            held[CLAIM] = claim
        return self.span(self.root, "", CYCLE_SPAN, (self.moments[0], self.moments[1]), held)


@dataclass
class _Operation:
    line: int
    begun: Record
    held: dict[str, Any]
    last_ns: int
    events: list[Event] = field(default_factory=list)
    blocks: bool = True
    end_ns: int | None = None
    error: str | None = None
    records_since_end: int = 0


class FileSpans(ABC):
    """The spans of one file. `offset_ns` is Unix time minus its monotonic time; `cycles` holds the traces by number."""

    def __init__(self, name: str, process: Record, offset_ns: int, cycles: dict[int, Cycle]) -> None:
        self.process = process
        self._name = name
        self._offset_ns = offset_ns
        self._cycles = cycles

    @abstractmethod
    def feed(self, line: int, record: Record) -> Iterator[Span]:
        """The spans that end with the next record; `line` is its number in the file. The first is not given."""

    @abstractmethod
    def finish(self, cycle: int) -> Iterator[Span]:
        """The spans of this cycle that no record ends: there are no further ones."""

    def resource(self) -> dict[str, Any]:
        """Attributes of the resource that the process is."""
        process = self.process
        return {
            "service.name": "restart_trace",
            "service.instance.id": f"{process['run_id']}/{self._name}",
            "host.name": process["host"],
            "process.pid": process["pid"],
            FILE: self._name,
            OFFSET_NS: self._offset_ns,
            PROCESS: {name: value for name, value in process.items() if name in RECORD_FIELDS["process"]},
        }

    def _cycle(self, number: int) -> Cycle:
        return self._cycles.setdefault(number, Cycle(self.process["run_id"], number))

    def _span_id(self, line: int) -> str:
        return identifier(8, self.process["run_id"], self._name, line)

    def _event(self, line: int, record: Record, otherwise_ns: int) -> Event:
        time_ns = record["time_ns"] + self._offset_ns if "time_ns" in record else otherwise_ns
        name = record["phase"] if record["type"] == "event" else record["type"]
        if (record.get("operation"), name) == ("failure", "detected"):
            name = FAULT_EVENT
        return Event(time_ns, name, _held(line, record))

    def _window(self, record: Record) -> tuple[int, int]:
        return record["start_ns"] + self._offset_ns, record["end_ns"] + self._offset_ns


def file_spans(name: str, process: Record, offset_ns: int, cycles: dict[int, Cycle]) -> FileSpans:
    """The spans of a file with this name and process record."""
    kind = RankSpans if process["role"] == "rank" else SupervisorSpans
    return kind(name, process, offset_ns, cycles)


class RankSpans(FileSpans):
    """The spans of a rank's file; what has no span of its own is an event of its operation, or of the process."""

    def __init__(self, name: str, process: Record, offset_ns: int, cycles: dict[int, Cycle]) -> None:
        super().__init__(name, process, offset_ns, cycles)
        self._of = self._cycle(process["cycle"])
        self._own = self._span_id(1)
        self._start_ns = self._last_ns = process["process_start_ns"] + offset_ns
        self._begun: dict[int, tuple[int, str]] = {}  # operation -> its line and kind, also after its end
        self._operations: dict[int, _Operation] = {}
        self._events: list[tuple[int, Event]] = []  # of the process, each with its line

    def feed(self, line: int, record: Record) -> Iterator[Span]:
        self._last_ns = max(self._last_ns, self._moment(record))
        kind = type_of(record)
        operation = self._operations.get(record["op"]) if "op" in record else None
        if kind == "operation_begin":
            moment = self._moment(record)
            self._begun[record["op"]] = line, record["operation"]
            self._operations[record["op"]] = _Operation(line, record, _held(line, record), moment)
            if record["operation"] == "startup":  # which may be long after its process, of a rank that has returned
                self._start_ns = moment
        elif kind == SPAN:
            yield self._phase(line, record, operation)
        elif kind == "iteration":
            held = _held(line, record) | {"megatron.iteration": record["step"], GOODPUT: False}
            yield self._of.span(self._span_id(line), self._own, ITERATION_SPAN, self._window(record), held)
        elif operation is None:
            yield from self._add_event(line, record)
        else:
            self._note(operation, line, record)
        for number in [number for number, one in self._operations.items() if self._is_over(one, record)]:
            yield self._close(self._operations.pop(number))

    def finish(self, cycle: int) -> Iterator[Span]:
        if cycle != self._of.number:
            return
        held = {"nvrx.cycle": self._of.number, "nvrx.rank": self.process["rank"]}
        events = [event for _, event in self._events]
        window = (self._start_ns, self._last_ns)
        yield self._of.span(self._own, self._of.root, PROCESS_SPAN, window, held, events)
        for operation in self._operations.values():
            yield self._close(operation)
        self._operations = {}

    def _moment(self, record: Record) -> int:
        moments = [record[name] + self._offset_ns for name in _TIMES if name in record]
        return max(moments, default=self._start_ns)

    def _phase(self, line: int, record: Record, operation: _Operation | None) -> Span:
        """The span of a phase. Its operation may be over, if a thread of its own does the rest."""
        is_blocking = record.get("blocking", True)
        begun = self._begun[record["op"]]
        if operation is not None:
            operation.blocks &= is_blocking
            operation.last_ns = max(operation.last_ns, self._moment(record))
        name = _name(begun[1], record["phase"], record.get("detail", ""))
        held = _held(line, record) | {GOODPUT: is_blocking}
        own = self._span_id(line)
        return self._of.span(own, self._span_id(begun[0]), name, self._window(record), held, error=record.get("error"))

    def _add_event(self, line: int, record: Record) -> Iterator[Span]:
        """Note an event of the process; the span of many earlier ones."""
        self._events.append((line, self._event(line, record, self._start_ns)))
        if len(self._events) > _MOST_EVENTS:
            events = self._events[:_MOST_EVENTS]
            del self._events[:_MOST_EVENTS]
            moments = [event.time_ns for _, event in events]
            own = identifier(8, self._span_id(events[0][0]), "events")
            window = (min(moments), max(moments))
            yield self._of.span(own, self._own, EVENTS_SPAN, window, {}, [event for _, event in events])

    def _note(self, operation: _Operation, line: int, record: Record) -> None:
        """Note a record of an operation that is no span."""
        moment = self._moment(record)
        operation.last_ns = max(operation.last_ns, moment)
        if record["type"] == "operation_end":
            fields = {name: value for name, value in record.items() if name not in (*_TIMES, "type", "op")}
            operation.held |= {END_LINE: line} | {f"{END_PREFIX}{name}": value for name, value in fields.items()}
            operation.error, operation.end_ns = record.get("error"), moment
        else:
            start_ns = operation.begun["start_ns"] + self._offset_ns
            operation.events.append(self._event(line, record, start_ns))

    def _is_over(self, operation: _Operation, record: Record) -> bool:
        """Whether the span of this operation has all its events, `record` being the latest: the last is its sample."""
        if operation.end_ns is None:
            return False
        operation.records_since_end += 1
        is_last = record.get("op") == operation.begun["op"] and record.get("at") == "end"
        return is_last or operation.records_since_end > _MOST_AFTER_END

    def _close(self, operation: _Operation) -> Span:
        start_ns = operation.begun["start_ns"] + self._offset_ns
        end_ns = operation.last_ns if operation.end_ns is None else operation.end_ns
        kind = operation.begun["operation"]
        name = _name(kind) if operation.blocks else f"{PREFIX}{kind}"
        held = operation.held | {GOODPUT: operation.blocks}
        own, window = self._span_id(operation.line), (start_ns, max(start_ns, end_ns))
        return self._of.span(own, self._own, name, window, held, operation.events, operation.error)


class SupervisorSpans(FileSpans):
    """A span per restart that the supervisor saw, in the trace of the cycle that it started, with its events."""

    def __init__(self, name: str, process: Record, offset_ns: int, cycles: dict[int, Cycle]) -> None:
        super().__init__(name, process, offset_ns, cycles)
        self.of_cycle: dict[int, list[tuple[int, Event]]] = {}  # each event with its line

    def feed(self, line: int, record: Record) -> Iterator[Span]:
        number = record.get("cycle", self.process["cycle"]) + 1
        self.of_cycle.setdefault(number, []).append((line, self._event(line, record, 0)))
        yield from ()

    def finish(self, cycle: int) -> Iterator[Span]:
        events = self.of_cycle.pop(cycle, [])
        if events:
            moments = [event.time_ns for _, event in events]
            of = self._cycle(cycle)
            held = {"nvrx.cycle": cycle, GOODPUT: True}
            own, window = self._span_id(events[0][0]), (min(moments), max(moments))
            yield of.span(own, of.root, SUPERVISOR_SPAN, window, held, [event for _, event in events])


def _held(line: int, record: Record) -> dict[str, Any]:
    """The attributes of a record: all fields that are not in the span's own times."""
    fields = {f"{PREFIX}{name}": value for name, value in record.items() if name not in (*_TIMES, "type")}
    return {TYPE: type_of(record), LINE: line} | fields


def _name(operation: str, phase: str = "", detail: str = "") -> str:
    own = ".".join(part for part in (operation, phase, detail) if part)
    return NVIDIA_NAMES.get((operation, phase, detail), f"{PREFIX}{own}")
