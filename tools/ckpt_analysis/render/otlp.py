"""A trace as OpenTelemetry spans in a file of OTLP/JSON. docs/opentelemetry.md has the names."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from restart_trace.schema import CYCLE_FILE_PATTERN, SCHEMA_VERSION

from ..common.errors import CouldNotRunError
from ..common.otlp import attributes
from ..ingest.clocks import clock_of, offsets_ns
from ..ingest.discover import TraceFile, list_trace
from ..ingest.lines import valid_records
from .otlp_spans import RESOURCE_OF_CYCLES, Cycle, Record, Span, SupervisorSpans, file_spans

_SERVER_ERROR, _INTERNAL = 2, 1  # STATUS_CODE_ERROR, SPAN_KIND_INTERNAL


@dataclass
class Written:
    """How many spans a file has, and how many lines of the trace could not be used."""

    spans: int = 0
    unusable_lines: int = 0


def write_otlp(stream: TextIO, directory: Path, run_id: str, advance: Callable[[int], object]) -> Written:
    """Write the run as one TracesData per line: a line per process, at the end one with the spans of the cycles.

    Raises CouldNotRunError if a cycle_CCC.json has a number that exceeds 64 bits.
    """
    files, written = _read(directory, run_id)
    offsets = offsets_ns([records[0][1] for _, records in files])
    cycles: dict[int, Cycle] = {}
    for file, records in files:
        process = records[0][1]
        of_file = file_spans(file.path.name, process, offsets[clock_of(process)], cycles)
        spans = [span for line, record in records[1:] for span in of_file.feed(line, record)]
        numbers = [*of_file.of_cycle] if isinstance(of_file, SupervisorSpans) else [process["cycle"]]
        spans += [span for number in numbers for span in of_file.finish(number)]
        _write(stream, of_file.resource(), [encoded(span) for span in spans], written)
        advance(len(records))
    holding = list_trace(directory).directory
    roots = [_cycle_span(cycle, holding) for _, cycle in sorted(cycles.items())]
    _write(stream, RESOURCE_OF_CYCLES, roots, written)
    return written


def encoded(span: Span) -> dict[str, Any]:
    """A span in OTLP/JSON. Raises ValueError if an attribute is a number that exceeds 64 bits."""
    found: dict[str, Any] = {"traceId": span.trace_id, "spanId": span.span_id}
    if span.parent:
        found["parentSpanId"] = span.parent
    found |= {"name": span.name, "kind": _INTERNAL}
    found |= {"startTimeUnixNano": str(span.start_ns), "endTimeUnixNano": str(span.end_ns)}
    events = [
        {"timeUnixNano": str(event.time_ns), "name": event.name, "attributes": attributes(event.attributes)}
        for event in span.events
    ]
    found |= {"attributes": attributes(span.attributes), "events": events}
    return found if span.error is None else found | {"status": {"code": _SERVER_ERROR, "message": span.error}}


def _read(directory: Path, run_id: str) -> tuple[list[tuple[TraceFile, Sequence[tuple[int, Record]]]], Written]:
    written = Written()
    found: list[tuple[TraceFile, Sequence[tuple[int, Record]]]] = []
    for file in list_trace(directory).files:
        records, unusable = valid_records(file)
        if records and records[0][1]["run_id"] == run_id:
            written.unusable_lines += unusable
            found.append((file, records))
    return found, written


def _write(stream: TextIO, resource: dict[str, Any], spans: list[dict[str, Any]], written: Written) -> None:
    scope = {"name": "restart_trace", "version": str(SCHEMA_VERSION)}
    entry = {"resource": {"attributes": attributes(resource)}, "scopeSpans": [{"scope": scope, "spans": spans}]}
    stream.write(json.dumps({"resourceSpans": [entry]}, separators=(",", ":"), allow_nan=False) + "\n")
    written.spans += len(spans)


def _cycle_span(cycle: Cycle, directory: Path) -> dict[str, Any]:
    try:
        return encoded(cycle.whole(directory))
    except (ValueError, RecursionError) as exc:
        path = directory / CYCLE_FILE_PATTERN.format(cycle=cycle.number)
        raise CouldNotRunError(f"{path}: OTLP cannot hold its content ({exc}): correct or remove the file") from None
