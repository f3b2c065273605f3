"""Spans, operations and events of one process. `NullRecorder` has the same interface and does nothing.

    with recorder.operation("save", tag="global_step5", step=5) as op:
        with op.span("serialize", file="mp_rank_00_model_states.pt") as span:
            span.bytes = write_it()

Recorder and Operation may be used from several threads at once; what a thread sets of an Operation (`bytes`, its
labels) is not added up: one thread does that. Instrumentation adds no collective, no device synchronisation and
no fsync.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from restart_trace.clock import now_ns, read_anchor
from restart_trace.schema import SCHEMA_VERSION, check_phase

Probe = Callable[[], Mapping[str, float]]


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
    """What the body of a span may fill in while it runs."""

    bytes: int | None = None


class Operation:
    """One save, load or start-up in progress. Spans may be added from any thread."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        op_id: int,
        start_ns: int,
        labels: dict[str, Any],
        engine: str | None,
    ) -> None:
        self._recorder = recorder
        self._labels: dict[str, Any] = {"operation": name, "op_id": op_id} | labels
        self._engine = {"engine": engine} if engine else {}
        self.start_ns = start_ns
        self.bytes: int | None = None
        self.num_files: int | None = None
        self.durable: bool | None = None
        self.failure: str | None = None
        self._read_ahead = 0  # bytes
        self._lock = threading.Lock()  # of _read_ahead
        recorder.write("operation_begin", **self._labels, **self._engine, start_ns=start_ns)

    def label(self, *, tag: str | None = None, step: int | None = None, engine: str | None = None) -> None:
        """Name the checkpoint, or the class of the engine, where it is only found out while the operation runs."""
        # New dicts, since another thread may be reading the old ones into a record.
        self._labels = self._labels | {k: v for k, v in (("tag", tag), ("step", step)) if v is not None}
        if engine is not None:
            self._engine = {"engine": engine}

    @contextmanager
    def span(
        self, phase: str, detail: str | None = None, *, file: str | None = None, blocking: bool = True
    ) -> Iterator[SpanHandle]:
        """Measure the body as one span. An exception is recorded in the span and passed on."""
        handle = SpanHandle()
        nvtx, thread = self._recorder.nvtx, threading.get_ident()
        if nvtx is not None:
            nvtx.range_push(f"{self._labels['operation']}/{phase}" + (f"/{detail}" if detail else ""))
        error: str | None = None
        start = now_ns()
        try:
            yield handle
        except BaseException as exc:
            error = f"{type(exc).__name__}: {exc}"
            raise
        finally:
            end = now_ns()
            # Ranges are a stack per thread: a span that ends on another thread must not close a range of that one.
            if nvtx is not None and threading.get_ident() == thread:
                nvtx.range_pop()
            self.add(
                phase, detail, start, end, file=file, num_bytes=handle.bytes, blocking=blocking, error=error
            )

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
        problems = check_phase(self._labels["operation"], phase, detail)
        if problems:
            raise ValueError(problems[0])
        if detail == "read" and blocking and num_bytes:
            num_bytes -= self._take_read_ahead(num_bytes)
        optional = {"detail": detail, "file": file, "bytes": num_bytes, "error": error}
        self._recorder.write(
            "span",
            **self._labels,
            phase=phase,
            **{k: v for k, v in optional.items() if v is not None},
            start_ns=start_ns,
            end_ns=end_ns,
            duration_ns=end_ns - start_ns if duration_ns is None else duration_ns,
            thread=thread or threading.current_thread().name,
            blocking=blocking,
        )

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

    def event(self, phase: str, detail: str) -> None:
        """A notice: a moment of this operation that is no span, such as which library really writes."""
        self._recorder.event(self._labels["operation"], phase, detail, self._labels.get("step"))

    def end(self, error: str | None = None) -> None:
        """Write the closing record. `bytes`, `num_files` and `durable` are taken as they stand."""
        error = error or self.failure
        optional = {"bytes": self.bytes, "num_files": self.num_files, "durable": self.durable, "error": error}
        end_ns = now_ns()
        self._recorder.write(
            "operation_end",
            **self._labels,
            **self._engine,
            start_ns=self.start_ns,
            end_ns=end_ns,
            outcome="failed" if error else "ok",
            **{k: v for k, v in optional.items() if v is not None},
        )
        self._recorder.probe(self._labels["operation"], self._labels["op_id"], "end")


class Recorder:
    """Writes the records of one process to a sink.

    `common` holds the fields that every record carries: run_id, cycle, rank, tp, pp, dp.
    """

    enabled = True

    def __init__(self, sink: Sink, common: Mapping[str, Any], probe: Probe | None = None) -> None:
        self._sink = sink
        self._common = {"v": SCHEMA_VERSION, "type": ""} | dict(common)
        self._probe = probe
        self._next_op_id = 0
        self._lost = 0
        self._closed = False
        self._lock = threading.Lock()  # of the three above
        self.nvtx: NvtxRanges | None = None  # torch.cuda.nvtx, once it is imported and CUDA is there

    def write(self, record_type: str, **fields: Any) -> None:
        """Write one record. Those that a full disk refused are counted in a later `records_lost` event.

        After `close` nothing is written: a thread that is still at work as the process ends has nobody to tell.
        """
        with self._lock:
            if self._closed:
                return
            written = self._sink.write(self._common | {"type": record_type} | fields)
            lost = self._lost
            self._lost = 0 if written else lost + 1
        if written and lost:
            self.event("failure", "records_lost", f"{lost} records before this one could not be written")

    def begin(
        self,
        name: str,
        *,
        tag: str | None = None,
        step: int | None = None,
        engine: str | None = None,
        start_ns: int | None = None,
    ) -> Operation:
        """Open an operation; the caller ends it. Prefer `operation`, which cannot be left open."""
        with self._lock:
            op_id = self._next_op_id
            self._next_op_id += 1
        labels = {k: v for k, v in (("tag", tag), ("step", step)) if v is not None}
        self.probe(name, op_id, "start")
        return Operation(self, name, op_id, now_ns() if start_ns is None else start_ns, labels, engine)

    @contextmanager
    def operation(
        self, name: str, *, tag: str | None = None, step: int | None = None, engine: str | None = None
    ) -> Iterator[Operation]:
        op = self.begin(name, tag=tag, step=step, engine=engine)
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
        at_ns: int | None = None,
    ) -> None:
        """Record a moment: now, or `at_ns` (monotonic, ns) where it was observed some time ago."""
        anchor = read_anchor()
        time_ns = anchor.monotonic_ns if at_ns is None else at_ns
        optional = {k: v for k, v in (("detail", detail), ("step", step)) if v is not None}
        self.write(
            "event",
            operation=operation,
            phase=phase,
            **optional,
            time_ns=time_ns,
            wall_ns=anchor.wall_ns + time_ns - anchor.monotonic_ns,
        )

    def probe(self, operation: str, op_id: int, at: str) -> None:
        """Sample memory and I/O counters; outside the operation's own wall time."""
        if self._probe is not None:
            values = dict(self._probe())
            self.write("probe", operation=operation, op_id=op_id, at=at, time_ns=now_ns(), values=values)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._sink.close()


class _NullSpan:
    bytes: int | None = None

    def __enter__(self) -> _NullSpan:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


class NullOperation(Operation):
    """Takes everything, records nothing."""

    def __init__(self) -> None:
        self.start_ns = 0
        self.bytes = self.num_files = self.durable = self.failure = None

    def label(self, *, tag: str | None = None, step: int | None = None, engine: str | None = None) -> None:
        return None

    def span(self, phase: str, detail: str | None = None, **_: Any) -> Any:  # type: ignore[override]
        return _NullSpan()

    def add(self, *_: Any, **__: Any) -> None:
        return None

    def was_read_ahead(self, num_bytes: int) -> None:
        return None

    def event(self, phase: str, detail: str) -> None:
        return None

    def end(self, error: str | None = None) -> None:
        return None


class NullRecorder(Recorder):
    """`--restart-trace off`: the interface of Recorder, no file, no clock reads."""

    enabled = False

    def __init__(self) -> None:
        self.nvtx = None

    def write(self, record_type: str, **fields: Any) -> None:
        return None

    def begin(self, name: str, **_: Any) -> Operation:
        return NullOperation()

    @contextmanager
    def operation(self, name: str, **_: Any) -> Iterator[Operation]:
        yield NullOperation()

    def event(self, *_: Any, **__: Any) -> None:
        return None

    def probe(self, operation: str, op_id: int, at: str) -> None:
        return None

    def close(self) -> None:
        return None
