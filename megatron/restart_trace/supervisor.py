"""Failure records, written by whoever kills and relaunches the job, into the job's own trace directory."""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.restart_trace import clock, cycles
from megatron.restart_trace.process import environment, versions
from megatron.restart_trace.recorder import Recorder
from megatron.restart_trace.schema import SUPERVISOR_FILE_PATTERN
from megatron.restart_trace.sink import JsonlSink


class SupervisorTrace:
    """Writes what a supervisor did to a run and saw of it."""

    def __init__(self, trace_dir: Path, sink: JsonlSink) -> None:
        self._trace_dir = trace_dir
        self._sink = sink
        self._started = False

    def failure(
        self, phase: str, *, cycle: int, detail: str | None = None, iteration: int | None = None
    ) -> None:
        """Record that `phase` (injected, detected, stopped or relaunched) happens now.

        `cycle` is the launch that failed. The run id is read from the trace directory, so the run must have
        started; raises ValueError if it has not.
        """
        newest = cycles.newest_cycle(self._trace_dir)
        if newest is None:
            raise ValueError(f"{self._trace_dir}: no run has been traced here yet, so none can have failed")
        common = {"run_id": newest[1]["run_id"], "cycle": cycle, "rank": -1, "tp": -1, "pp": -1, "dp": -1}
        recorder = Recorder(self._sink, common)
        if not self._started:
            self._started = True
            write_process_record(recorder)
        recorder.event("failure", phase, detail, iteration)


def write_process_record(recorder: Recorder) -> None:
    anchor = clock.read_anchor()
    started = clock.process_start_ns()
    recorder.write(
        "process",
        role="supervisor",
        host=socket.gethostname(),
        boot_id=clock.boot_id(),
        pid=os.getpid(),
        world_size=0,
        layout={"tp": 0, "pp": 0, "dp": 0},
        process_start_ns=anchor.monotonic_ns if started is None else started,
        process_start_source="python" if started is None else "os",
        wall_ns=anchor.wall_ns,
        monotonic_ns=anchor.monotonic_ns,
        anchor_error_ns=anchor.error_ns,
        versions=versions(),
        environment=environment(os.environ),
        argv=sys.argv,
    )


@contextmanager
def open_supervisor_trace(trace_dir: str | Path) -> Iterator[SupervisorTrace]:
    """Open the next free `supervisor_NNN.jsonl` in `trace_dir`."""
    directory = Path(trace_dir)
    directory.mkdir(parents=True, exist_ok=True)
    for index in itertools.count():
        try:
            sink = JsonlSink(directory / SUPERVISOR_FILE_PATTERN.format(index=index))
            break
        except FileExistsError:
            continue
    try:
        yield SupervisorTrace(directory, sink)
    finally:
        sink.close()
