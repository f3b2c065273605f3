"""The start-up of a process as one operation: from its start by the OS to the end of its first optimizer step.

    startup = Startup(recorder, trace_dir, rank, cycle)
    with startup.phase("imports"):
        import torch
    ...
    startup.iteration_done(step, start_ns, end_ns)   # after every iteration

The first iteration ends the operation. In a relaunched run `caught_up` is recorded when the run again passes the
iteration that it had reached before the failure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from restart_trace import clock, under_way
from restart_trace.raised import Raised
from restart_trace.recorder import Operation, Recorder, SpanHandle
from restart_trace.regular import open_regular
from restart_trace.schema import RANK_FILE_PATTERN

PRELOAD_VARIABLE = "RESTART_TRACE_PRELOAD"
_TAIL_BYTES = 1 << 16
Phase = tuple[str, str | None, int, int]  # name, detail, begin, end: monotonic ns


@dataclass(frozen=True)
class Preload:
    """Times at which a launcher imported modules for the ranks that it then forked: monotonic, ns."""

    started_ns: int  # start of the launcher's process
    imports_ns: int  # begin of its imports
    done_ns: int  # end of its imports

    def to_text(self) -> str:
        """Value of RESTART_TRACE_PRELOAD, by which the ranks get these times."""
        return f"{self.started_ns}:{self.imports_ns}:{self.done_ns}"


def preload_of(env: Mapping[str, str]) -> Preload | None:
    """The times in RESTART_TRACE_PRELOAD; None if nothing was imported for this start, or the rank was not forked."""
    text = env.get(PRELOAD_VARIABLE)
    return Preload(*map(int, text.split(":"))) if text else None


class Interruptions:
    """Phases that interrupt another one, one after another."""

    def __init__(self) -> None:
        self.windows: list[Phase] = []

    @contextmanager
    def phase(self, name: str, detail: str | None = None) -> Iterator[None]:
        """Measure the body as this phase. Bodies are not nested."""
        since = clock.now_ns()
        try:
            yield
        finally:
            self.windows.append((name, detail, since, clock.now_ns()))


class Startup:
    """Start-up phases of one process. `entered_ns`: when its main function was entered (monotonic, ns).

    `preload`: if a launcher did the imports for this start and then forked the process, the start-up begins with the
    start of the launcher, as if the process had done the imports itself.
    """

    def __init__(
        self,
        recorder: Recorder,
        trace_dir: Path | None,
        rank: int,
        cycle: int,
        entered_ns: int,
        preload: Preload | None = None,
        *,
        opened_ns: int | None = None,
        released_ns: int | None = None,
        before: Sequence[Phase] = (),
        contiguous: bool = False,
    ) -> None:
        """`opened_ns`: end of `process_start`, if in the past. `released_ns`: when a process that was there before was
        told to start, where its start-up begins, or goes on after the phases `before` (an in-process restart's).
        `contiguous`: as in Recorder.begin, for the phases up to the end of the first iteration.
        """
        self._recorder = recorder
        started = clock.process_start_ns() if released_ns is None else released_ns
        own_ns = entered_ns if started is None else started
        start_ns = before[0][2] if before else own_ns if preload is None else preload.started_ns
        self._operation: Operation | None = recorder.begin("startup", start_ns=start_ns, contiguous=contiguous)
        self._reached = reached_iteration(trace_dir, rank, cycle) if trace_dir else None
        for phase in before:
            self._operation.add(*phase)
        if preload is not None:
            self._operation.add("process_start", None, preload.started_ns, preload.imports_ns)
            self._operation.add("imports", None, preload.imports_ns, preload.done_ns)
            own_ns = preload.done_ns
        self._operation.add("process_start", None, own_ns, opened_ns or clock.now_ns())
        self._contiguous = contiguous
        self._first_step_end_ns = 0
        self._others: list[tuple[int, int]] = []
        self._op = self._operation

    @property
    def operation(self) -> Operation | None:
        """The operation of the start-up; None once the first iteration has ended it."""
        return self._operation

    def phase(self, name: str, detail: str | None = None) -> AbstractContextManager[SpanHandle]:
        """Measure one phase of the start-up."""
        return self._op.span(name, detail)

    @contextmanager
    def phase_around(self, name: str, depends_on: str = under_way.OWN_WORK) -> Iterator[Interruptions]:
        """Measure one phase that others interrupt repeatedly. `depends_on`: as in restart_trace.under_way.

        The body measures the interruptions with the object that it gets. The phase is recorded in pieces, before and
        after each of them.
        """
        inner = Interruptions()
        number = under_way.begin(depends_on, "startup", name)
        start = self._op.opened_ns()
        raised = Raised()
        try:
            with raised:
                yield inner
        finally:
            end = clock.now_ns()
            under_way.end(number)
            self._op.closed()
            for phase, detail, began, ended in inner.windows:
                self._op.add(name, None, start, began)
                self._op.add(phase, detail, began, ended)
                start = ended
            self._op.add(name, None, start, end, error=raised.error)

    @contextmanager
    def phase_beside_operation(self, name: str) -> Iterator[None]:
        """Measure the body except an operation within it, such as a load: one phase in two spans.

        If no operation begins and ends in the body, it is one span.
        """
        begin = self._op.opened_ns()
        try:
            yield
        finally:
            end, inner = clock.now_ns(), self._recorder.ended
            self._op.closed()
            if inner is not None and inner.end_ns is not None and inner.start_ns >= begin:
                self._op.add(name, None, begin, inner.start_ns)
                begin = inner.end_ns
            self._op.add(name, None, begin, end)

    def spent(self, start_ns: int, end_ns: int) -> None:
        """Another phase has this time: as far as it lies within the first step, it is no part of that."""
        self._others.append((start_ns, end_ns))

    def iteration_done(self, step: int, loop_start_ns: int, end_ns: int, *, numbered: bool = True) -> None:
        """Called when iteration `step` ended at `end_ns`; the training loop was entered at `loop_start_ns`.

        `numbered`: `step` is a number of the run, not of this process, so it can be compared with earlier cycles.
        """
        if self._operation is not None:
            begin_ns = min(loop_start_ns, self._op.until_ns()) if self._contiguous else loop_start_ns
            other_ns = _overlap_ns(self._others, begin_ns, end_ns)
            own_ns = end_ns - begin_ns - other_ns if other_ns else None
            self._op.add("first_step", None, begin_ns, end_ns, duration_ns=own_ns)
            self._op.end()
            self._operation = None
            self._first_step_end_ns = end_ns
        if self._reached is not None and numbered and step >= self._reached:
            self._op.add("caught_up", None, self._first_step_end_ns, end_ns)
            self._reached = None


def _overlap_ns(windows: list[tuple[int, int]], begin_ns: int, end_ns: int) -> int:
    """Time within begin_ns and end_ns that one of the windows has, which may overlap."""
    overlap_ns, since_ns = 0, begin_ns
    for start_ns, until_ns in sorted(windows):
        until_ns, start_ns = min(until_ns, end_ns), max(start_ns, since_ns)
        if until_ns > start_ns:
            overlap_ns, since_ns = overlap_ns + until_ns - start_ns, until_ns
    return overlap_ns


def reached_iteration(trace_dir: Path, rank: int, cycle: int) -> int | None:
    """Last iteration that earlier cycles of this run finished; None if there is none.

    Read from the end of this rank's files or, if it has none because the layout changed, of rank 0's.
    """
    for previous in range(cycle - 1, -1, -1):
        for candidate in (rank, 0):
            path = trace_dir / RANK_FILE_PATTERN.format(rank=candidate, cycle=previous)
            if path.is_file():  # a FIFO would block
                step = _last_iteration(path)
                if step is not None:
                    return step
                break
    return None


def _last_iteration(path: Path) -> int | None:
    """Step of the last complete iteration record. The spans of a large save may follow it in the file."""
    size = path.stat().st_size
    tail = _TAIL_BYTES
    while True:
        with open(open_regular(path), "rb") as file:
            file.seek(max(0, size - tail))
            lines = file.read().splitlines()
        for line in reversed(lines):
            if b'"type":"iteration"' in line and line.endswith(b"}") and line.startswith(b"{"):
                with suppress(ValueError, KeyError, RecursionError):  # a damaged line
                    if type(step := json.loads(line)["step"]) is int:
                        return step
        if tail >= size:
            return None
        tail *= 8
