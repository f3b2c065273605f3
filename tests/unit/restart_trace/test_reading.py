"""Records as they are meant, from a file in which each says only what is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from restart_trace.reading import read_records
from restart_trace.recorder import Recorder
from restart_trace.sink import JsonlSink
from tests.unit.trace_helpers import PROCESS


def test_records_are_joined_with_their_process_and_operation(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000_cycle_000.jsonl"
    recorder = Recorder(JsonlSink(path), PROCESS)
    load = recorder.begin("load", start_ns=5)
    save = recorder.begin("save", tag="global_step7", step=7, engine="E", start_ns=6)
    load.add("discover", None, 10, 30)
    load.label(tag="global_step5", step=5)
    load.add("load", "read", 10, 30, duration_ns=15, blocking=False, thread="reader")
    save.end()
    recorder.iteration(8, 0, 1)
    recorder.close()
    with path.open("ab") as file:
        file.write(b'{"type":"iteration","step":9')  # a kill cut it short
    process, _, _, discover, _, read, end, iteration = read_records(path)
    identity = {name: PROCESS[name] for name in ("run_id", "cycle", "rank", "tp", "pp", "dp")}
    assert process["host"] == PROCESS["host"]
    assert discover == identity | {
        "type": "span", "op": 0, "operation": "load", "phase": "discover", "start_ns": 10, "end_ns": 30,
        "duration_ns": 20, "thread": "MainThread", "blocking": True,
    }  # fmt: skip
    assert (read["tag"], read["step"], read["operation"]) == ("global_step5", 5, "load")
    assert (read["duration_ns"], read["thread"], read["blocking"]) == (15, "reader", False)
    assert (end["operation"], end["tag"], end["engine"], end["start_ns"]) == ("save", "global_step7", "E", 6)
    assert iteration["rank"] == 0 and iteration["step"] == 8


def test_a_line_that_is_no_record_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"type":"process"}\ngarbage\n')
    with pytest.raises(ValueError):
        list(read_records(path))
