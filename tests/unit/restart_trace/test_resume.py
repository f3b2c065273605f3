"""Supervisor records, and a run that is really killed, resumed and analysed."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from restart_trace import cycles
from restart_trace.supervisor import open_supervisor_trace
from tests.unit.trace_helpers import read, read_process, start_python
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.json_output import to_dict
from tools.ckpt_analysis.report import analyse


def test_supervisor(tmp_path: Path) -> None:
    run_id, _ = cycles.claim_cycle(tmp_path, "key", 0)
    for number in range(2):
        with open_supervisor_trace(tmp_path) as supervisor:
            supervisor.failure("injected", cycle=0, detail="sigkill", iteration=8)
            supervisor.failure("detected", cycle=0)
        path = tmp_path / f"supervisor_00{number}.jsonl"
        process = read_process(path)
        injected, detected = read(path)
        assert (process["type"], process["role"], process["rank"]) == ("process", "supervisor", -1)
        assert {record["run_id"] for record in (process, injected, detected)} == {run_id}
        assert (injected["phase"], injected["detail"], injected["step"]) == ("injected", "sigkill", 8)
        assert injected["time_ns"] <= detected["time_ns"]


def test_supervisor_of_nothing(tmp_path: Path) -> None:
    with open_supervisor_trace(tmp_path) as supervisor, pytest.raises(ValueError, match="no run has been traced"):
        supervisor.failure("injected", cycle=0)


WORKER = """
    import os, sys, time
    from pathlib import Path
    entered = time.monotonic_ns()
    from restart_trace.process import RankIdentity, open_rank_trace
    from restart_trace.startup import Startup
    directory, rank, first, last, saved_at = Path(sys.argv[1]), *map(int, sys.argv[2:])
    identity = RankIdentity(rank, 2, rank, (0, 0, rank), (1, 1, 2))
    env = dict(os.environ, RESTART_TRACE_LAUNCH_ID=f"from{first}")
    asked = dict(engine_asked="torch", durability="fsync", probes=True)
    recorder, cycle = open_rank_trace(directory, identity, env, **asked)
    startup = Startup(recorder, directory, rank, cycle, entered)
    recorder.write("runtime", engine_used="TorchEngine", engine_asked="torch")
    if cycle:
        with recorder.operation("load", engine="TorchEngine") as op:
            with op.span("discover"):
                op.label(tag=f"global_step{first - 1}", step=first - 1)
            with op.span("load", "read", file="f") as span:
                span.bytes = op.bytes = 10
    loop = time.monotonic_ns()
    for step in range(first, last + 1):
        start = time.monotonic_ns()
        time.sleep(0.01)
        end = time.monotonic_ns()
        startup.iteration_done(step, loop, end)
        recorder.iteration(step, start, end, loss=5 / step)
        if step == saved_at:
            with recorder.operation("save", tag=f"global_step{step}", step=step, engine="TorchEngine") as op:
                with op.span("flush", "write", file=f"f{rank}") as span:
                    time.sleep(0.02)
                    span.bytes = op.bytes = 1000
                with op.span("commit", "publish"):
                    op.num_files, op.durable = 1, True
    if not cycle:
        op = recorder.begin("save", tag="global_step99", step=99)
        with op.span("collect"):
            pass
        print("ready", flush=True)
        time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_understood(tmp_path: Path) -> None:
    with open_supervisor_trace(tmp_path) as supervisor:
        ranks = [start_python(WORKER, tmp_path, rank, 1, 8, 5) for rank in range(2)]
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        supervisor.failure("injected", cycle=0, detail="sigkill", iteration=8)
        injected = time.monotonic()
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait(timeout=300)
        supervisor.failure("stopped", cycle=0)
        supervisor.failure("relaunched", cycle=0)
    ranks = [start_python(WORKER, tmp_path, rank, 6, 12, 10) for rank in range(2)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    whole = time.monotonic() - injected

    report = to_dict(analyse(load_trace(tmp_path)).report)
    # A loaded machine gets between two spans of a few ms.
    (problem,) = [problem for problem in report["problems"] if problem["kind"] != "low_coverage"]
    assert (problem["kind"], problem["data"]["last_phases"]) == ("unfinished_operation", {"collect": [0, 1]})
    assert [(save["tag"], save["outcome"]) for save in report["saves"]] == [
        ("global_step5", "ok"),
        ("global_step99", "unfinished"),
        ("global_step10", "ok"),
    ]
    assert report["saves"][0]["bytes"] == 2000 and report["saves"][0]["durable_s"] >= 0.02
    (restart,) = report["restarts"]
    assert (restart["resumed_step"], restart["reached_step"], restart["lost_steps"]) == (5, 8, 3)
    assert (restart["repeated_steps"], restart["equal_losses"]) == (3, 3)
    assert restart["lost_work_s"] >= 0.03
    tick = 0.02  # a process may seem to start a clock tick before it did
    assert 0.01 < restart["time_to_first_step_s"] < restart["restart_s"] + tick
    assert restart["restart_s"] < restart["failure_to_caught_up_s"] < whole
    assert restart["time_to_first_step_s"] < restart["caught_up_s"] < whole + tick
    assert restart["failure"]["relaunched_s"] >= restart["failure"]["stopped_s"] > 0
    assert report["loads"][0]["tag"] == "global_step5"
