"""Spans, operations and events of one process.

    with recorder.operation("save", tag="global_step5", step=5) as op:
        with op.span("serialize", file="mp_rank_00_model_states.pt") as span:
            span.bytes = write_it()

Recorder and Operation are thread-safe, except for the attributes of an Operation such as `bytes`: values of several
threads are not added up, so one thread sets them. Instrumentation adds no collective, no device synchronisation and no
fsync.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from restart_trace import under_way
from restart_trace.clock import now_ns, read_anchor
from restart_trace.probes import Probe, forgiving
from restart_trace.raised import Raised
from restart_trace.sampler import Sampler
from restart_trace.schema import MAIN_THREAD, SCHEMA_VERSION, SPAN, check_phase
from restart_trace.sink import NullSink

# Records that later records refer to, and the notice that records are missing. These must not be lost.
_REQUIRED = ("process", "operation_begin", "operation_label")
_RECORDS_LOST = "records_lost"


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not None, since no field of a record is null."""
    return {name: value for name, value in fields.items() if value is not None}


class Sink(Protocol):
    """The destination of records."""

    def write(self, record: dict[str, Any]) -> bool: ...

    def close(self) -> None: ...


class NvtxRanges(Protocol):
    """The part of torch.cuda.nvtx that the recorder uses."""

    def range_push(self, msg: str) -> Any: ...

    def range_pop(self) -> Any: ...


@dataclass
class SpanHandle:
    """A span in progress. The body may set `bytes`; `duration_ns` is set once it has ended."""

    bytes: int | None = None
    duration_ns: int = 0


class Operation:
    """One save, load or start-up in progress. Spans may be added from any thread."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        op_id: int,
        start_ns: int,
        labels: Mapping[str, Any],
        *,
        contiguous: bool = False,
        inferred: bool = False,
        weights_only: bool = False,
        ranks: int | None = None,
    ) -> None:
        """`contiguous`, `inferred`, `weights_only`, `ranks`: as in Recorder.begin."""
        self._recorder = recorder
        self._contiguous_on = threading.get_ident() if contiguous else None
        self._open = 0  # number of open spans of that thread
        self._name = name
        self._op_id = op_id
        self._labels: dict[str, Any] = {"tag": None, "step": None, "engine": None, "tier": None, **labels}
        self.start_ns = start_ns
        self.end_ns: int | None = None
        self.bytes: int | None = None
        self.num_files: int | None = None
        self.durable: bool | None = None
        self.failure: str | None = None
        self._read_ahead = 0  # bytes
        self._of_thread = threading.local()  # `until_ns`: end of the latest span of the thread
        self._of_thread.until_ns = start_ns
        self._measured: dict[str, float] = {}
        self._lock = threading.RLock()  # protects _read_ahead; reentrant for the reason given in Recorder
        # An untraced operation may never be ended.
        self._under_way = under_way.begin(under_way.OWN_WORK, name, thread=0) if recorder.enabled else None
        what = {"inferred": inferred or None, "weights_only": weights_only or None, "ranks": ranks}
        said = given(self._labels | what)
        recorder.write("operation_begin", operation=name, op=op_id, **said, start_ns=start_ns)

    def label(
        self, *, tag: str | None = None, step: int | None = None, engine: str | None = None, tier: str | None = None
    ) -> None:
        """Set the checkpoint's tag and step, the engine's class or the tier of a load once they are known."""
        found = given({"tag": tag, "step": step, "engine": engine, "tier": tier})
        new = {name: value for name, value in found.items() if value != self._labels[name]}
        if new:
            self._labels = self._labels | new
            self._recorder.write("operation_label", op=self._op_id, **new)

    def until_ns(self) -> int:
        """End of the latest span of this thread, ns; before the first span the begin of the operation, or now.

        A span that begins there leaves no gap. It then includes the time that recording the span before took, which is
        long on a machine with fewer cores than ranks, so use it for a phase that may include such work.
        """
        return getattr(self._of_thread, "until_ns", None) or now_ns()

    def opened_ns(self, *, joined: bool = False) -> int:
        """Begin, ns, of a span that this thread opens now; the caller calls `closed` at its end.

        It is `until_ns` if the span is `joined`, or if the operation is contiguous and the thread has no other open
        span.
        """
        now = now_ns()
        if self._contiguous_on == threading.get_ident():
            self._open += 1
            joined = joined or self._open == 1
        return self.until_ns() if joined else now

    def closed(self) -> None:
        """Note that a span of this thread has ended."""
        if self._contiguous_on == threading.get_ident():
            self._open -= 1

    @contextmanager
    def span(
        self,
        phase: str,
        detail: str | None = None,
        *,
        file: str | None = None,
        blocking: bool = True,
        joined: bool = False,
    ) -> Iterator[SpanHandle]:
        """Measure the body as one span. An exception is recorded in the span and raised again.

        `joined`: the span begins at `until_ns`.
        """
        handle = SpanHandle()
        nvtx, thread = self._recorder.nvtx, threading.get_ident()
        if nvtx is not None:
            nvtx.range_push(f"{self._name}/{phase}" + (f"/{detail}" if detail else ""))
        raised = Raised()
        number = under_way.begin(under_way.OWN_WORK, self._name, self._labels["tag"], phase, detail, file)
        start = self.opened_ns(joined=joined)
        try:
            with raised:
                yield handle
        finally:
            end = now_ns()
            handle.duration_ns = end - start
            under_way.end(number)
            self.closed()
            # NVTX ranges are a stack per thread: a span that ends on another thread must not pop a range of that
            # thread.
            if nvtx is not None and threading.get_ident() == thread:
                nvtx.range_pop()
            size, error = handle.bytes, raised.error
            self.add(phase, detail, start, end, file=file, num_bytes=size, blocking=blocking, error=error)

    def add(
        self,
        phase: str,
        detail: str | None,
        start_ns: int,
        end_ns: int,
        *,
        duration_ns: int | None = None,
        file: str | None = None,
        num_bytes: int | None = None,
        blocking: bool = True,
        error: str | None = None,
        thread: str | None = None,
        batches: int | None = None,
    ) -> None:
        """Record a span that the caller has measured, on `thread` if not on this one.

        `duration_ns`: given if several phases alternate within one window, such as a serializer that calls the writer.
        It is the time that this phase took; the phases of a window add up to at most the window.
        Raises ValueError for a phase or detail that is not in the schema.
        """
        if not self._recorder.enabled:  # an untraced operation is used for saves and loads alike
            return
        problems = check_phase(self._name, phase, detail)
        if problems:
            raise ValueError(problems[0])
        if detail == "read" and blocking and num_bytes:
            num_bytes -= self._take_read_ahead(num_bytes)
        if thread is None:
            self._of_thread.until_ns = max(end_ns, getattr(self._of_thread, "until_ns", 0))
        thread = thread or threading.current_thread().name
        fields = {
            "op": self._op_id,
            "phase": phase,
            "detail": detail,
            "file": file,
            "bytes": num_bytes,
            "start_ns": start_ns,
            "end_ns": end_ns,
            "duration_ns": None if duration_ns == end_ns - start_ns else duration_ns,
            "thread": None if thread == MAIN_THREAD else thread,
            "blocking": None if blocking else False,
            "error": error,
            "batches": batches,
        }
        self._recorder.write(SPAN, **given(fields))

    def was_read_ahead(self, num_bytes: int) -> None:
        """Note that `num_bytes` of what this load is going to read were prefetched, and recorded in background spans.

        The load's own `read` spans then count that many bytes less: they come from the page cache, and no byte is
        counted twice.
        """
        with self._lock:
            self._read_ahead += num_bytes

    def _take_read_ahead(self, num_bytes: int) -> int:
        with self._lock:
            taken = min(num_bytes, self._read_ahead)
            self._read_ahead -= taken
            return taken

    def measure(self, **values: float) -> None:
        """Add values of this operation that belong to no span, such as counters of a device; a name ends in its unit.

        They are recorded with the sample at the end of the operation.
        """
        with self._lock:
            self._measured |= values

    def event(self, phase: str, detail: str) -> None:
        """Record a notice of this operation, such as the library that really writes."""
        self._recorder.event(self._name, phase, detail, self._labels["step"])

    def end(self, error: str | None = None, *, at_ns: int | None = None) -> None:
        """Write the closing record, with the current values of `bytes`, `num_files` and `durable`.

        `at_ns`: when it ended (monotonic), if in the past.
        """
        error = error or self.failure
        if self._under_way is not None:
            under_way.end(self._under_way)
        self.end_ns = now_ns() if at_ns is None else at_ns
        self._recorder.ended = self
        fields = {
            "op": self._op_id,
            "end_ns": self.end_ns,
            "outcome": "failed" if error else "ok",
            "bytes": self.bytes,
            "num_files": self.num_files,
            "durable": self.durable,
            "error": error,
        }
        self._recorder.write("operation_end", **given(fields))
        sample = self._recorder.sample()
        if self._measured:
            at_ns, sampled = sample or (now_ns(), {})
            sample = at_ns, sampled | self._measured
        self._recorder.probe(self._op_id, "end", sample)


class Recorder:
    """Writes the records of one process to a sink.

    `process`: the first record, without its version and type; docs/log_format.md lists its fields.
    """

    def __init__(self, sink: Sink, process: Mapping[str, Any], probe: Probe | None = None) -> None:
        self._sink = sink
        self.enabled = not isinstance(sink, NullSink)
        self._probe = None if probe is None else forgiving(probe, "samples of memory and I/O")
        self._op_ids = itertools.count()
        self.ended: Operation | None = None  # the latest operation that has ended
        # Required records that a full disk has refused so far. They are written before any other record.
        self._pending: list[dict[str, Any]] = []
        self._lost = 0
        self._closed = False
        self._sampler: Sampler | None = None
        # Protects _pending, _lost and _closed. Reentrant, since a signal handler of the program may save during a
        # write.
        self._lock = threading.RLock()
        self.nvtx: NvtxRanges | None = None  # torch.cuda.nvtx, once it is imported and CUDA is available
        self.write("process", v=SCHEMA_VERSION, **process)

    def write(self, record_type: str, **fields: Any) -> None:
        """Write one record. Records that a full disk refused are counted in a later `records_lost` event.

        After `close` nothing is written, not even by a thread that still works as the process ends.
        """
        record = fields if record_type == SPAN else {"type": record_type} | fields
        if record_type not in _REQUIRED and fields.get("phase") != _RECORDS_LOST:
            self._write(record)
            return
        with self._lock:
            if not self._closed:
                self._pending.append(record)
                self._write_pending()

    def _write(self, record: dict[str, Any]) -> None:
        """Write a record that may be lost."""
        with self._lock:
            if self._closed:
                return
            written = (not self._pending or self._write_pending()) and self._sink.write(record)
            lost = self._lost
            self._lost = 0 if written else lost + 1
        if written and lost:
            self.event("failure", _RECORDS_LOST, f"{lost} records before this one could not be written")

    def _write_pending(self) -> bool:
        """Write the pending records; False if a full disk refuses one. The caller holds the lock."""
        while self._pending:
            record = self._pending.pop(0)  # removed first, so that a signal handler does not write it again
            if not self._sink.write(record):
                self._pending.insert(0, record)
                return False
        return True

    def begin(
        self,
        name: str,
        *,
        tag: str | None = None,
        step: int | None = None,
        engine: str | None = None,
        start_ns: int | None = None,
        contiguous: bool = False,
        inferred: bool = False,
        weights_only: bool = False,
        ranks: int | None = None,
    ) -> Operation:
        """Open an operation; the caller must end it. Prefer `operation`, which cannot be left open.

        `inferred`: it is made of single calls, which no library said to be one save or load.

        `weights_only`: it saves weights alone, on some ranks or all: no checkpoint that a training resumes.

        `ranks`: how many take part in it, if that is known.

        `contiguous`: each span of the calling thread begins where the one before it ended, and the first where the
        operation began; for a thread whose work between two spans always belongs to the second.
        """
        op_id = next(self._op_ids)
        sample = self.sample()  # taken before the start, written after it
        labels = {"tag": tag, "step": step, "engine": engine}
        start_ns = now_ns() if start_ns is None else start_ns
        what: Any = {"contiguous": contiguous, "inferred": inferred, "weights_only": weights_only, "ranks": ranks}
        operation = Operation(self, name, op_id, start_ns, labels, **what)
        self.probe(op_id, "start", sample)
        return operation

    @contextmanager
    def operation(
        self,
        name: str,
        *,
        tag: str | None = None,
        step: int | None = None,
        engine: str | None = None,
        contiguous: bool = False,
    ) -> Iterator[Operation]:
        """An operation that lasts as long as the body; arguments as in `begin`."""
        op = self.begin(name, tag=tag, step=step, engine=engine, contiguous=contiguous)
        raised = Raised()
        try:
            with raised:
                yield op
        finally:
            op.end(raised.error)

    def iteration(self, step: int, start_ns: int, end_ns: int, loss: float | None = None) -> None:
        record: dict[str, Any] = {"type": "iteration", "step": step, "start_ns": start_ns, "end_ns": end_ns}
        if loss is not None and math.isfinite(loss):
            record["loss"] = loss
        self._write(record)

    def event(
        self,
        operation: str,
        phase: str,
        detail: str | None = None,
        step: int | None = None,
        *,
        cycle: int | None = None,
        at_ns: int | None = None,
    ) -> None:
        """Record an event, now or at `at_ns` (monotonic, ns).

        `cycle`: the launch that the event belongs to, for a process that records events of several.
        """
        anchor = read_anchor()
        time_ns = anchor.monotonic_ns if at_ns is None else at_ns
        self.write(
            "event",
            operation=operation,
            phase=phase,
            **given({"detail": detail, "step": step, "cycle": cycle}),
            time_ns=time_ns,
            wall_ns=anchor.wall_ns + time_ns - anchor.monotonic_ns,
        )

    def process_ended(self, error: str | None = None) -> None:
        """Record that this process ends by itself, now. `error`: why, unless it has done all that it was to do."""
        self.event("process", "ended", error)

    def sample(self) -> tuple[int, dict[str, float]] | None:
        """(monotonic time in ns, memory and I/O counters); None without probes, or if they fail: logged once."""
        if self._probe is None:
            return None
        values = self._probe()
        return None if values is None else (now_ns(), values)

    def probe(self, op_id: int, at: str, sample: tuple[int, dict[str, float]] | None) -> None:
        """Record the sample taken at the start or end of an operation."""
        if sample is not None:
            self.write("probe", op=op_id, at=at, time_ns=sample[0], values=sample[1])

    def sample_every(self, interval_s: float, probe: Probe) -> None:
        """Record the values of `probe` every `interval_s` seconds from now on, whether operations run or not."""
        if self.enabled and self._sampler is None:
            self._sampler = Sampler(self.write, probe, interval_s)

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._sink.close()


def untraced_recorder() -> Recorder:
    """A recorder that records nothing: `--restart-trace off`."""
    return Recorder(NullSink(), {})


def untraced_operation() -> Operation:
    """An operation that records nothing, for callers without a trace."""
    return untraced_recorder().begin("load")
