"""Failure records. The process that kills and relaunches a job writes them into the job's trace directory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from restart_trace import cycles
from restart_trace.process import process_fields
from restart_trace.recorder import Recorder
from restart_trace.schema import SUPERVISOR_FILE_PATTERN
from restart_trace.sink import JsonlSink


class SupervisorTrace:
    """Writes the failure records of a supervisor."""

    def __init__(self, trace_dir: Path, sink: JsonlSink, instrument: str) -> None:
        self._instrument = instrument
        self._trace_dir = trace_dir
        self._sink = sink
        self._recorder: Recorder | None = None  # once the run is known

    def failure(
        self,
        phase: str,
        *,
        cycle: int,
        detail: str | None = None,
        iteration: int | None = None,
        at_ns: int | None = None,
    ) -> None:
        """Record that `phase` (injected, detected, stopped or relaunched) happens now, or happened at `at_ns`.

        `cycle`: the launch that failed. `at_ns`: monotonic, ns. The run id is read from the trace directory; raises
        ValueError if no run has started there.
        """
        if self._recorder is None:
            self._recorder = Recorder(self._sink, self._process_record(cycle))
        self._recorder.event("failure", phase, detail, iteration, cycle=cycle, at_ns=at_ns)

    def _process_record(self, cycle: int) -> dict[str, Any]:
        newest = cycles.newest_cycle(self._trace_dir)
        if newest is None:
            raise ValueError(f"{self._trace_dir}: no run has been traced here, so no failure can be recorded")
        no_place = {"rank": -1, "tp": -1, "pp": -1, "dp": -1}
        launched = {"role": "supervisor", "instrument": self._instrument, "world_size": 0}
        launched["layout"] = {"tp": 0, "pp": 0, "dp": 0}
        return {"run_id": newest[1]["run_id"], "cycle": cycle} | no_place | launched | process_fields(os.environ)


@contextmanager
def open_supervisor_trace(trace_dir: str | Path, instrument: str = "trainer") -> Iterator[SupervisorTrace]:
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
        yield SupervisorTrace(directory, sink, instrument)
    finally:
        sink.close()
