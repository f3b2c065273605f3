"""Sends the spans of a run to an OpenTelemetry collector while its trace files grow.

It only reads the files of the trace, so that training does not wait for it, whatever the collector does. A span is sent
once it has ended. What a collector has not taken stays here until it is back, and no more is read until then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from restart_trace.regular import open_regular
from restart_trace.schema import SCHEMA_VERSION

from ..common.errors import CouldNotRunError
from ..common.otlp import CLAIM, attributes
from ..ingest.clocks import clock_of, offsets_ns
from ..ingest.discover import DEFAULT_SUBDIRECTORY, LogDirectoryError, TraceFile, list_files
from ..ingest.lines import RecordStream
from .otlp_spans import RESOURCE_OF_CYCLES, Cycle, FileSpans, Record, Span, SupervisorSpans, file_spans

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

PACKAGES = "the extra otlp: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
_TRACES_PATH = "/v1/traces"
_REQUEST_S = 3.0  # a request to the collector, with its repetitions
_INTERVAL_S = 1.0  # between two looks at the files
_BATCH = 512  # spans of a request
_MOST_BYTES = 1 << 20  # that are read of a file at a time
_QUIET_S, _LONGEST_END_S = 1.0, 10.0  # without a new record, after which a run that has ended is complete; at most


def traces_url(endpoint: str) -> str:
    """Where a collector at this base URL takes spans: its path /v1/traces, as OTEL_EXPORTER_OTLP_ENDPOINT has it."""
    return endpoint if endpoint.rstrip("/").endswith(_TRACES_PATH) else endpoint.rstrip("/") + _TRACES_PATH


class Collector:
    """An OpenTelemetry collector that takes OTLP over HTTP. Headers, certificates: OTEL_EXPORTER_OTLP_* (the SDK's).

    Raises CouldNotRunError if OpenTelemetry's SDK is not installed.
    """

    def __init__(self, endpoint: str, tell: Callable[[str], None]) -> None:
        """`tell`: is given the one warning about a collector that does not answer."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ModuleNotFoundError as error:
            raise CouldNotRunError(f"--otlp {endpoint}: {error.name} is not installed: {PACKAGES}") from None
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would warn at each attempt
        self._exporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=_REQUEST_S)
        self._endpoint = endpoint
        self._tell = tell
        self._told = False
        self._unsent: list[ReadableSpan] = []
        self.sent = 0

    def add(self, resource: dict[str, Any], spans: list[Span]) -> None:
        """Spans of one resource, for the next `send`."""
        if spans:
            of = _resource(resource)
            self._unsent += [_readable(span, of) for span in spans]

    def send(self) -> bool:
        """Send what is not sent yet. False if the collector has not taken all of it."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        while self._unsent:
            batch = self._unsent[:_BATCH]
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                if not self._told:
                    self._told = True
                    self._tell(
                        f"--otlp {self._endpoint}: the collector takes no spans now; training goes on, and what it "
                        "has not got when the job ends is in the trace files: ckpt-analysis export --format otlp"
                    )
                return False
            self.sent += len(batch)
            del self._unsent[: len(batch)]
        return True

    @property
    def unsent(self) -> int:
        """Number of spans that the collector has not taken."""
        return len(self._unsent)


@dataclass
class _File:
    """How far a file is read; `spans` is None until its process record is there."""

    found: TraceFile
    stream: RecordStream
    offset: int = 0
    spans: FileSpans | None = None


class Follower:
    """Reads the trace files of some cycles as they grow, and gives their spans to a collector.

    `first`, `last`: the cycles; without a last one all from the first on. A cycle is over when a later one has begun.
    """

    def __init__(self, directory: Path, collector: Collector, first: int, last: int | None) -> None:
        self._directory = directory
        self._collector = collector
        self._first, self._last = first, last
        self._files: dict[Path, _File] = {}
        self._cycles: dict[int, Cycle] = {}
        self._finished: set[int] = set()
        self._offsets: dict[str, int] = {}  # of each clock; it stays what it was when it was first used

    def poll(self) -> bool:
        """Read what was appended, and send its spans; False if nothing was, or the collector takes none at present."""
        if not self._collector.send():
            return False
        self._find_files()
        read = [(file, self._read(file)) for file in self._files.values()]
        for file, records in read:
            if file.spans is None and file.stream.process is not None:
                file.spans = self._begin(file, file.stream.process)
            if file.spans is not None:
                added = [span for line, record in records if line > 1 for span in file.spans.feed(line, record)]
                self._collector.add(file.spans.resource(), added)
        is_new = any(records for _, records in read)
        if not is_new:
            for number in sorted(self._cycles)[:-1]:
                self._finish(number)
        return self._collector.send() and is_new

    def finish(self) -> bool:
        """Send the spans that no record ends. False if the collector has not taken all."""
        seen = [number for file in self._files.values() for number in _restarts(file) if self._covers(number)]
        for number in sorted({*self._cycles, *seen}):
            self._finish(number)
        return self._collector.send()

    def _covers(self, cycle: int) -> bool:
        return self._first <= cycle and (self._last is None or cycle <= self._last) and cycle not in self._finished

    def _find_files(self) -> None:
        try:
            nested = self._directory / DEFAULT_SUBDIRECTORY
            if not self._files and nested.is_dir():
                self._directory = nested
            listed = list_files(self._directory).files
        except LogDirectoryError:  # the first rank makes it
            return
        for found in listed:
            if found.path not in self._files and (found.cycle is None or self._covers(found.cycle)):
                self._files[found.path] = _File(found, RecordStream(found))

    def _read(self, file: _File) -> list[tuple[int, Record]]:
        try:
            with open(open_regular(file.found.path), "rb") as stream:
                stream.seek(file.offset)
                data = stream.read(_MOST_BYTES)
        except OSError:  # of a network file system; the next time, or never
            return []
        file.offset += len(data)
        return file.stream.feed(data)

    def _begin(self, file: _File, process: Record) -> FileSpans:
        processes = [other.stream.process for other in self._files.values() if other.stream.process is not None]
        for clock, offset_ns in offsets_ns(processes).items():
            self._offsets.setdefault(clock, offset_ns)
        return file_spans(file.found.path.name, process, self._offsets[clock_of(process)], self._cycles)

    def _finish(self, number: int) -> None:
        for path, file in [*self._files.items()]:
            if file.spans is not None:
                self._collector.add(file.spans.resource(), [*file.spans.finish(number)])
            if file.found.cycle == number:
                del self._files[path]
        cycle = self._cycles.pop(number)
        self._collector.add(RESOURCE_OF_CYCLES, [_with_valid_claim(cycle.whole(self._directory))])
        self._finished.add(number)


def follow(follower: Follower, wait: Callable[[float], bool]) -> bool:
    """Follow until `wait`, which takes seconds, returns True: the run has ended. False if spans remain unsent.

    What the ranks still write is read for a second after the last record, and for ten seconds at most.
    """
    while not wait(0.0 if follower.poll() else _INTERVAL_S):
        pass
    begun = last = time.monotonic()
    while last - begun < _LONGEST_END_S:
        if follower.poll():
            last = time.monotonic()
        elif time.monotonic() - last > _QUIET_S:
            break
        time.sleep(_QUIET_S / 10)
    return follower.finish()


def _restarts(file: _File) -> list[int]:
    return [*file.spans.of_cycle] if isinstance(file.spans, SupervisorSpans) else []


def _with_valid_claim(span: Span) -> Span:
    """The span without the content of a cycle_CCC.json that OTLP cannot hold."""
    try:
        attributes(span.attributes)
    except (ValueError, RecursionError):
        return replace(span, attributes={name: value for name, value in span.attributes.items() if name != CLAIM})
    return span


def _resource(held: dict[str, Any]) -> Resource:
    from opentelemetry.sdk.resources import Resource

    return Resource(held)


def _readable(span: Span, resource: Resource) -> ReadableSpan:
    """The span as OpenTelemetry's SDK has it."""
    from opentelemetry.sdk.trace import Event as SdkEvent
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

    def context(span_id: str) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(span.trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=flags)

    return ReadableSpan(
        span.name,
        context(span.span_id),
        context(span.parent) if span.parent else None,
        resource,
        span.attributes,
        [SdkEvent(event.name, event.attributes, event.time_ns) for event in span.events],
        status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope("restart_trace", str(SCHEMA_VERSION)),
    )
