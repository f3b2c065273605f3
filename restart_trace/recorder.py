"""Spans, operations and events of one process.

    with recorder.operation("save", tag="global_step5", step=5) as op:
        with op.span("serialize", file="mp_rank_00_model_states.pt") as span:
            span.bytes = write_it()

Recorder and Operation may be used from several threads at once; what a thread sets of an Operation (`bytes`, its
labels) is not added up: one thread does that. Instrumentation adds no collective, no device synchronisation and
no fsync.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from restart_trace import under_way
from restart_trace.clock import now_ns, read_anchor
from restart_trace.sampler import Sampler
from restart_trace.schema import MAIN_THREAD, SCHEMA_VERSION, SPAN, check_phase
from restart_trace.sink import NullSink

Probe = Callable[[], Mapping[str, float]]
# What later records refer to; and what says that records are missing.
_REQUIRED = ("process", "operation_begin", "operation_label")
_RECORDS_LOST = "records_lost"


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that have a value: no field of a record is null."""
    return {name: value for name, value in fields.items() if value is not None}


class Sink(Protocol):
    """Where records go."""

    def write(self, record: dict[str, Any]) -> bool: ...

    def close(self) -> None: ...


class NvtxRanges(Protocol):
    """The part of torch.cuda.nvtx that the recorder uses."""

    def range_push(self, msg: str) -> Any: ...

    def range_pop(self) -> Any: ...


@dataclass
class SpanHandle:
    """What the body of a span may fill in while it runs, and how long it took once it has ended."""

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
    ) -> None:
        """`contiguous`: as of Recorder.begin."""
        self._recorder = recorder
        self._contiguous_on = threading.get_ident() if contiguous else None
        self._open = 0  # spans of that thread
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
        self._of_thread = threading.local()  # `until_ns`: where the latest span of the thread ends
        self._of_thread.until_ns = start_ns
        self._measured: dict[str, float] = {}
        self._lock = threading.RLock()  # of _read_ahead; see Recorder
        # Nobody ends an untraced operation.
        self._under_way = under_way.begin(under_way.OWN_WORK, name, thread=0) if recorder.enabled else None
        recorder.write("operation_begin", operation=name, op=op_id, **given(self._labels), start_ns=start_ns)

    def label(
        self, *, tag: str | None = None, step: int | None = None, engine: str | None = None, tier: str | None = None
    ) -> None:
        """Name the checkpoint, the class of the engine, or where a load reads, as it is found out while it runs."""
        found = given({"tag": tag, "step": step, "engine": engine, "tier": tier})
        new = {name: value for name, value in found.items() if value != self._labels[name]}
        if new:
            self._labels = self._labels | new
            self._recorder.write("operation_label", op=self._op_id, **new)

    def until_ns(self) -> int:
        """Where the latest span of this thread ends, ns; before the first where the operation began, or else now.

        A span that begins there leaves nothing out. It takes in the recording of the one before, too, which is long
        where a machine has fewer cores than ranks: so let one do it whose phase may include such work.
        """
        return getattr(self._of_thread, "until_ns", None) or now_ns()

    def opened_ns(self, *, joined: bool = False) -> int:
        """Where a span begins that this thread opens now, ns; `closed` follows. At `until_ns` if it is joined, or if
        the operation is contiguous and no other span of the thread is open.
        """
        now = now_ns()
        if self._contiguous_on == threading.get_ident():
            self._open += 1
            joined = joined or self._open == 1
        return self.until_ns() if joined else now

    def closed(self) -> None:
        """A span of this thread is over."""
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
        """Measure the body as one span. An exception is recorded in the span and passed on.

        `joined`: it begins at `until_ns`.
        """
        handle = SpanHandle()
        nvtx, thread = self._recorder.nvtx, threading.get_ident()
        if nvtx is not None:
            nvtx.range_push(f"{self._name}/{phase}" + (f"/{detail}" if detail else ""))
        error: str | None = None
        number = under_way.begin(under_way.OWN_WORK, self._name, self._labels["tag"], phase, detail, file)
        start = self.opened_ns(joined=joined)
        try:
            yield handle
        except BaseException as exc:
            error = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            end = now_ns()
            handle.duration_ns = end - start
            under_way.end(number)
            self.closed()
            # Ranges are a stack per thread: a span that ends on another thread must not close a range of that one.
            if nvtx is not None and threading.get_ident() == thread:
                nvtx.range_pop()
            self.add(phase, detail, start, end, file=file, num_bytes=handle.bytes, blocking=blocking, error=error)

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
    ) -> None:
        """Record a span that was measured elsewhere, by `thread` if not by this one.

        `duration_ns` is given where several phases alternate within one window (a serializer that calls the
        writer): then each states the time it really took, and together they are at most the window.
        Raises ValueError for a phase or detail that the schema does not have.
        """
        if not self._recorder.enabled:  # an untraced operation serves saves and loads alike
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
        }
        self._recorder.write(SPAN, **given(fields))

    def was_read_ahead(self, num_bytes: int) -> None:
        """Of what this load is going to read, `num_bytes` were read from storage before it, as background spans say.

        Its own spans of `read` count so many fewer: those bytes come from the page cache, and none counts twice.
        """
        with self._lock:
            self._read_ahead += num_bytes

    def _take_read_ahead(self, num_bytes: int) -> int:
        with self._lock:
            taken = min(num_bytes, self._read_ahead)
            self._read_ahead -= taken
            return taken

    def measure(self, **values: float) -> None:
        """Numbers of this operation that no span has, such as what a device says of itself; a name ends in its unit.

        They are recorded with what is sampled at the end.
        """
        with self._lock:
            self._measured |= values

    def event(self, phase: str, detail: str) -> None:
        """A notice: a moment of this operation that is no span, such as which library really writes."""
        self._recorder.event(self._name, phase, detail, self._labels["step"])

    def end(self, error: str | None = None) -> None:
        """Write the closing record. `bytes`, `num_files` and `durable` are taken as they stand."""
        error = error or self.failure
        if self._under_way is not None:
            under_way.end(self._under_way)
        self.end_ns = now_ns()
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

    `process` is the first record, but for its version and type: docs/log_format.md has its fields.
    """

    def __init__(self, sink: Sink, process: Mapping[str, Any], probe: Probe | None = None) -> None:
        self._sink = sink
        self.enabled = not isinstance(sink, NullSink)
        self._probe = probe
        self._op_ids = itertools.count()
        self.ended: Operation | None = None  # the latest operation that has ended
        # What must not be lost (_OWED), until a full disk takes it: nothing else is written before it.
        self._pending: list[dict[str, Any]] = []
        self._lost = 0
        self._closed = False
        self._sampler: Sampler | None = None
        # Of what is owed, lost and closed. Reentrant: a signal handler of the program may save amid a write.
        self._lock = threading.RLock()
        self.nvtx: NvtxRanges | None = None  # torch.cuda.nvtx, once it is imported and CUDA is there
        self.write("process", v=SCHEMA_VERSION, **process)

    def write(self, record_type: str, **fields: Any) -> None:
        """Write one record. Those that a full disk refused are counted in a later `records_lost` event.

        After `close` nothing is written: a thread that is still at work as the process ends has nobody to tell.
        """
        record = fields if record_type == SPAN else {"type": record_type} | fields
        with self._lock:
            if self._closed:
                return
            if record_type in _REQUIRED or fields.get("phase") == _RECORDS_LOST:
                self._pending.append(record)
                self._write_pending()
                return
            written = self._write_pending() and self._sink.write(record)
            lost = self._lost
            self._lost = 0 if written else lost + 1
        if written and lost:
            self.event("failure", _RECORDS_LOST, f"{lost} records before this one could not be written")

    def _write_pending(self) -> bool:
        """Write what is owed; False if a full disk does not take it. The caller holds the lock."""
        while self._pending:
            record = self._pending.pop(0)  # first: what interrupts the write must not write it again
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
    ) -> Operation:
        """Open an operation; the caller ends it. Prefer `operation`, which cannot be left open.

        `contiguous`: each span of the calling thread begins where the one before it ended, the first where the
        operation began. That is for a thread which does nothing between two spans that is not a part of the second.
        """
        op_id = next(self._op_ids)
        sample = self.sample()  # before the start, and written after it
        labels = {"tag": tag, "step": step, "engine": engine}
        start_ns = now_ns() if start_ns is None else start_ns
        operation = Operation(self, name, op_id, start_ns, labels, contiguous=contiguous)
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
        """An operation that lasts as long as the body; arguments as of `begin`."""
        op = self.begin(name, tag=tag, step=step, engine=engine, contiguous=contiguous)
        error: str | None = None
        try:
            yield op
        except BaseException as exc:
            error = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            op.end(error)

    def iteration(self, step: int, start_ns: int, end_ns: int, loss: float | None = None) -> None:
        optional = {} if loss is None or not math.isfinite(loss) else {"loss": loss}
        self.write("iteration", step=step, start_ns=start_ns, end_ns=end_ns, **optional)

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
        """Record a moment: now, or `at_ns` (monotonic, ns) where it was observed some time ago.

        `cycle` is the launch that it is of, where a process tells of several.
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

    def sample(self) -> tuple[int, dict[str, float]] | None:
        """(time in monotonic ns, memory and I/O counters); None without probes."""
        if self._probe is None:
            return None
        values = dict(self._probe())
        return now_ns(), values

    def probe(self, op_id: int, at: str, sample: tuple[int, dict[str, float]] | None) -> None:
        """Record what was sampled at the start or end of an operation."""
        if sample is not None:
            self.write("probe", op=op_id, at=at, time_ns=sample[0], values=sample[1])

    def sample_every(self, interval_s: float, probe: Probe) -> None:
        """Record what `probe` returns every `interval_s` seconds from now on, whether operations run or not."""
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
    """An operation that records nothing, for callers that trace none."""
    return untraced_recorder().begin("load")
