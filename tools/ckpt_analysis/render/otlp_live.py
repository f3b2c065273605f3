"""Sends the spans of a run to an OpenTelemetry collector while its trace files grow.

It only reads the files of the trace, so that training does not wait for it, whatever the collector does. A span is sent
once it has ended. What a collector has not taken stays here until it is back, and no more is read until then.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from restart_trace.collector import INSTALL
from restart_trace.regular import open_regular
from restart_trace.schema import SCHEMA_VERSION

from ..common.errors import CouldNotRunError
from ..common.http_errors import why_no_answer
from ..common.otlp import CLAIM, attributes
from ..ingest.clocks import clock_of, offsets_ns
from ..ingest.discover import LogDirectoryError, TraceFile, list_growing, list_trace
from ..ingest.lines import RecordStream
from .otlp_spans import RESOURCE_OF_CYCLES, Cycle, FileSpans, Record, Span, SupervisorSpans, file_spans

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

_TRACES_PATH = "/v1/traces"
_CONNECT_S, _ANSWER_S, _LAST_ANSWER_S = 3.0, 30.0, 3.0  # of a request, at most; the last at the end of the run
_OF_SPANS = (400, 413)  # statuses that a smaller request may not get
_LATER = (408, 429)  # statuses below 500 that the same request may not get again
_INTERVAL_S = 2.0  # between two looks at the files
_BATCH = 512  # spans of a request
_MOST_BYTES = 1 << 20  # that are read of a file at a time
_QUIET_S = 1.0  # without a new record, after which a run that has ended is complete
_LONGEST_GAP_S = 0.6 * _QUIET_S  # that counts between two looks
_LONGEST_QUIET_S = 60.0  # the same, while processes of the run are, or may be, still there
_LONGEST_END_S = 10.0  # of a run that goes on


def traces_url(endpoint: str) -> str:
    """Where a collector at this base URL takes spans: its path /v1/traces, as OTEL_EXPORTER_OTLP_ENDPOINT has it."""
    return endpoint if endpoint.rstrip("/").endswith(_TRACES_PATH) else endpoint.rstrip("/") + _TRACES_PATH


class Collector:
    """An OpenTelemetry collector that takes OTLP over HTTP. Headers, certificates: OTEL_EXPORTER_OTLP_* (the SDK's).

    Raises CouldNotRunError if OpenTelemetry's SDK is not installed.
    """

    def __init__(self, endpoint: str, tell: Callable[[str], None]) -> None:
        """`tell`: is given one warning about a collector that takes no spans now, and one about a refusal."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ModuleNotFoundError as error:
            reason = f"{error.name} is not installed: the extra otlp: {INSTALL}"
            raise CouldNotRunError(f"--otlp {endpoint}: {reason}") from None
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it would warn at each attempt
        self._session = _session()
        self._exporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=_CONNECT_S, session=self._session)
        self._endpoint = endpoint
        self._tell = tell
        self._told: set[str] = set()
        self._unsent: list[ReadableSpan] = []
        self.sent = self.refused = 0

    def add(self, resource: dict[str, Any], spans: list[Span]) -> None:
        """Spans of one resource, for the next `send`."""
        if spans:
            of = _resource(resource)
            self._unsent += [_readable(span, of) for span in spans]

    def send(self) -> bool:
        """Send what is not sent yet; drop what the collector will never take. False if it does not answer."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        size = _BATCH
        while self._unsent:
            batch = self._unsent[:size]
            self._session.status, self._session.why = 0, ""
            taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
            status = self._session.status
            if not taken and (not 400 <= status < 500 or status in _LATER):
                self._warn("takes no spans now", status, self._session.why)
                return False
            if not taken and status in _OF_SPANS and len(batch) > 1:
                size = len(batch) // 2
                continue
            if taken:
                self.sent += len(batch)
            else:
                self.refused += len(batch)
                self._warn("refuses spans", status)
            del self._unsent[: len(batch)]
            size = min(2 * size, _BATCH)
        return True

    def run_ended(self) -> None:
        """From now on wait for an answer for a few seconds only."""
        self._session.answer_s = _LAST_ANSWER_S

    @property
    def unsent(self) -> int:
        """Number of spans that the collector has not taken."""
        return len(self._unsent) + self.refused

    def _warn(self, what: str, status: int, why: str = "") -> None:
        """Tell it once. `status`: of the answer; 0 if there was none, and `why`."""
        if what not in self._told:
            self._told.add(what)
            why = f"it answers with status {status}" if status else why
            answer = f" ({why})" if why else ""
            self._tell(
                f"--otlp {self._endpoint}: the collector {what}{answer}; training goes on, and what the collector has "
                "not got when the job ends is in the trace files: ckpt-analysis export --format otlp"
            )


@dataclass
class _File:
    """How far a file is read; `spans` is None until its process record is there. `wrong`: why it cannot be read.

    `has_ended`: its process has recorded that it ends.
    """

    found: TraceFile
    stream: RecordStream
    offset: int = 0
    spans: FileSpans | None = None
    wrong: str = ""
    has_ended: bool = False


class Follower:
    """Reads the trace files of some cycles as they grow, and gives their spans to a collector.

    `first`, `last`: the cycles; without a last one all from the first on. A cycle is over when a later one has begun.
    `tell` is given a warning for each file that cannot be read.
    """

    def __init__(
        self, directory: Path, collector: Collector, first: int, last: int | None, tell: Callable[[str], None]
    ) -> None:
        self._given = self._directory = directory
        self._collector = collector
        self._tell = tell
        self._is_whole = True  # no file was left out
        self._unread = 0  # bytes of the files that are left
        self.is_behind = False  # a file has more than was read of it last
        self._first, self._last = first, last
        self._files: dict[Path, _File] = {}
        self._cycles: dict[int, Cycle] = {}
        self._finished: set[int] = set()
        self._left_out: set[Path] = set()
        self._offsets: dict[str, int] = {}  # of each clock; it stays what it was when it was first used

    def poll(self) -> bool:
        """Read what was appended, and send its spans; False if nothing was, or the collector takes none at present."""
        if not self._collector.send():
            return False
        self._find_files()
        before = self._bytes_read()
        self.is_behind = False
        read = [(file, self._read(file)) for file in self._files.values()]
        for file, records in read:
            self._tell_what_is_wrong(file, file.stream.fault and f"line 1: {file.stream.fault}")
            if file.spans is None and file.stream.process is not None:
                file.spans = self._begin(file, file.stream.process)
            if file.spans is not None:
                added = [span for line, record in records if line > 1 for span in file.spans.feed(line, record)]
                self._collector.add(file.spans.resource(), added)
        is_new = self._bytes_read() > before
        if not is_new:
            for number in sorted(self._cycles)[:-1]:
                self._finish(number)
        return self._collector.send() and is_new

    def finish(self) -> bool:
        """Send the spans that no record ends. False if the collector has not got all that is in the files."""
        seen = [number for file in self._files.values() for number in _restarts(file) if self._covers(number)]
        for number in sorted({*self._cycles, *seen}):
            self._finish(number)
        for file in self._files.values():
            self._leave(file)
        if self._unread > 0:
            self._tell(f"{self._directory}: {self._unread} bytes were not read, and their spans not sent")
        self._check_trace()
        return self._collector.send() and not self._collector.refused and not self._unread and self._is_whole

    def ended_but(self, pid: int) -> bool:
        """Whether all processes of the followed cycles have ended, apart from this one.

        A process of another host has ended if its cycle is not the newest, or if it recorded its end. One that was
        killed recorded none.
        """
        host, newest = socket.gethostname(), max(self._cycles, default=None)
        for file in self._files.values():
            process = file.stream.process
            if file.found.rank is None or process is None:
                continue
            if process["host"] == host:
                is_there = process["pid"] != pid and _is_alive(process["pid"])
            else:
                is_there = file.found.cycle == newest and not file.has_ended
            if is_there:
                return False
        return True

    def run_ended(self) -> None:
        """Tell the collector's side that the run has ended."""
        self._collector.run_ended()

    def _bytes_read(self) -> int:
        return sum(file.offset for file in self._files.values())

    def _check_trace(self) -> None:
        try:
            list_trace(self._given)
        except LogDirectoryError as error:
            self._is_whole = False
            self._tell(str(error))

    def _leave(self, file: _File) -> None:
        """No more is read of this file."""
        self._unread += max(0, file.found.size() - file.offset)
        is_torn = file.stream.process is None and file.stream.torn
        self._tell_what_is_wrong(file, file.wrong or ("line 1: is cut short" if is_torn else ""))

    def _tell_what_is_wrong(self, file: _File, wrong: str) -> None:
        if wrong and file.found.path not in self._left_out:
            self._left_out.add(file.found.path)
            self._is_whole = False
            self._tell(f"{file.found.path.name}: {wrong}: the file is left out")

    def _covers(self, cycle: int) -> bool:
        return self._first <= cycle and (self._last is None or cycle <= self._last) and cycle not in self._finished

    def _find_files(self) -> None:
        try:
            listing = list_growing(self._given)
        except LogDirectoryError:  # the first rank makes it
            return
        self._directory = listing.directory
        for found in listing.files:
            if found.path not in self._files and (found.cycle is None or self._covers(found.cycle)):
                self._files[found.path] = _File(found, RecordStream(found))

    def _read(self, file: _File) -> list[tuple[int, Record]]:
        try:
            with open(open_regular(file.found.path), "rb") as stream:
                stream.seek(file.offset)
                data = stream.read(_MOST_BYTES)
        except OSError as error:  # of a network file system; the next time, or never
            file.wrong = error.strerror or str(error)
            return []
        file.wrong = ""
        self.is_behind = self.is_behind or len(data) == _MOST_BYTES
        file.offset += len(data)
        records = file.stream.feed(data)
        file.has_ended = file.has_ended or any(_is_end(record) for _, record in records)
        return records

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
                self._leave(self._files.pop(path))
        cycle = self._cycles.pop(number)
        self._collector.add(RESOURCE_OF_CYCLES, [_with_valid_claim(cycle.whole(self._directory))])
        self._finished.add(number)


def follow(follower: Follower, wait: Callable[[float], bool], pid: int | None) -> bool:
    """Follow until `wait`, which takes seconds, returns True: the run has ended. False if spans remain unsent.

    What its processes still write is then read until they have ended (but not `pid`, which may wait for this one), and
    a second after that. Without `pid` the run may go on: what it has written until now is read.
    """
    while not wait(0.0 if follower.poll() and follower.is_behind else _INTERVAL_S):
        pass
    follower.run_ended()
    begun = looked = time.monotonic()
    quiet_s = 0.0
    while True:
        goes_on = pid is not None and not follower.ended_but(pid)  # before the files are read: so they are complete
        has_grown = follower.poll()
        now = time.monotonic()
        # One look is not enough: the machine may have stood still before it, or the collector.
        quiet_s, looked = 0.0 if has_grown else quiet_s + min(now - looked, _LONGEST_GAP_S), now
        if quiet_s > (_LONGEST_QUIET_S if goes_on else _QUIET_S):
            break
        if pid is None and now - begun > _LONGEST_END_S and not follower.is_behind:
            break
        time.sleep(_QUIET_S / 10)
    return follower.finish()


def _is_end(record: Record) -> bool:
    """Whether this is what a process records of its end."""
    return record.get("operation") == "process" and record.get("phase") == "ended"


def _is_alive(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        return not select.select([descriptor], [], [], 0)[0]
    finally:
        os.close(descriptor)


def _session() -> Any:
    """A session of HTTP that keeps the status of the last answer, or why there was none (`why`).

    It waits for answers as long as it is told.
    """
    import requests

    class Session(requests.Session):
        status, why, answer_s = 0, "", _ANSWER_S

        def request(self, *positional: Any, **named: Any) -> requests.Response:
            named["timeout"] = (_CONNECT_S, self.answer_s)
            if isinstance(self.verify, str):  # OTEL_EXPORTER_OTLP_CERTIFICATE: else REQUESTS_CA_BUNDLE would count
                named["verify"] = self.verify
            try:
                response = super().request(*positional, **named)
            except OSError as error:  # all of requests' are
                self.why = why_no_answer(error)
                raise
            self.status = response.status_code
            return response

    return Session()


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
