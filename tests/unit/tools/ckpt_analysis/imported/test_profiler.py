"""Traces of torch.profiler: spans as Kineto writes them, and a trace that torch does write."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.ckpt_analysis.analysis_helpers import ROOT
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.common.errors import CouldNotRunError
from tools.ckpt_analysis.imported.profiler import read_profile
from tools.ckpt_analysis.imported.to_report import to_report
from tools.ckpt_analysis.model.imported_run import Range
from tools.ckpt_analysis.render.json_output import to_dict

# Five steps, of which the profiler records the last four (steps 1 to 4 by its count); saves in steps 2 and 3.
PROGRAM = """
import sys, time, torch
import torch.distributed.checkpoint as dcp
from torch.profiler import ProfilerActivity, profile, record_function, schedule
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
def step():
    model(torch.ones(1, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with record_function("forward 7"):
        time.sleep(0.01)
def clocked(what, work):
    began = time.monotonic_ns()
    work()
    print(what, began, time.monotonic_ns())
file = sys.argv[1] + "/model.pt"
with profile(
    activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=4), with_stack=True,
    on_trace_ready=lambda p: p.export_chrome_trace(sys.argv[1] + "/trace.json"),
) as profiler:
    for number in range(5):
        step()
        if number == 2:
            clocked("save", lambda: torch.save(model.state_dict(), file))
            clocked("load", lambda: torch.load(file))
        if number == 3:
            with record_function("checkpoint_save"):
                clocked("save", lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=sys.argv[1] + "/dcp"))
        profiler.step()
"""


@pytest.mark.slow
def test_a_trace_that_torch_writes(tmp_path: Path) -> None:
    """Saves and loads are within the program's own clock, and are most of it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    clock = [line.split() for line in done.stdout.splitlines() if line.startswith(("save ", "load "))]
    took = {"save": [], "load": []}
    for what, begin, end in clock:
        took[what].append((int(end) - int(begin)) / 1e9)
    run = read_profile(tmp_path / "trace.json", 1)
    assert [(save.tag, save.completed) for save in run.saves] == [("ProfilerStep#2", True), ("ProfilerStep#3", True)]
    found = {"save": [save.call.max_s for save in run.saves if save.call]}
    found["load"] = [load.call.max_s for load in run.loads if load.call]
    assert {what: len(of) for what, of in found.items()} == {"save": 2, "load": 1}
    for seen, printed in ((found["save"][0], took["save"][0]), (found["load"][0], took["load"][0])):
        assert 0 < seen <= printed
    assert found["save"][1] >= took["save"][1]  # the program's own span is around the call
    assert [each.step for each in run.iterations] == [1, 2, 3, 4]
    assert all(each.step_s and each.step_s >= 0.01 for each in run.iterations)
    assert run.unused_timers["forward N"] == 4 and run.unused_timers["Optimizer.step#AdamW.step"] == 4
    assert "forward N (4)" in str(to_dict(to_report(run, tmp_path))["problems"])


def span(name: str, start_s: float, took_s: float, category: str = "user_annotation", tid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start_s * 1e6, "dur": took_s * 1e6}


def call(name: str, start_s: float, took_s: float, tid: int = 7) -> dict[str, Any]:
    return span(name, start_s, took_s, "python_function", tid)


SAVE, DCP_SAVE = "torch/serialization.py(944): save", "/lib/torch/distributed/checkpoint/state_dict_saver.py(87): save"
ASYNC_SAVE = "torch/distributed/checkpoint/state_dict_saver.py(210): async_save"


def write(path: Path, events: list[Any], rank: int = 0, world_size: int | None = 2) -> Path:
    job = {} if world_size is None else {"distributedInfo": {"rank": rank, "world_size": world_size}}
    content = json.dumps({"schemaVersion": 1} | job | {"traceEvents": events}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def test_ranks_are_one_run(tmp_path: Path) -> None:
    """A save takes as long as its slowest rank, a step as its slowest without what is in it."""
    for rank, name in enumerate(("a.pt.trace.json", "b.pt.trace.json.gz")):
        write(tmp_path / name, [
            {"ph": "M", "name": "process_name", "args": {}}, span("ProfilerStep#4", 0, 3 + rank),
            span("ProfilerStep#5", 10, 2), call(DCP_SAVE, 1, 1 + rank / 2), call(SAVE, 1.5, 0.25),
            span("gpu step", 0, 9, "gpu_user_annotation"), span("allreduce 3", 2, 1), span("allreduce 4", 4, 1),
        ], rank)  # fmt: skip
    (tmp_path / "notes.txt").write_text("not read")
    run = read_profile(tmp_path, None)
    assert run.launched.world_size == 2
    assert [(save.step, save.completed, save.call) for save in run.saves] == [(4, True, Range(1.5, 1.0))]
    assert [(each.step, each.step_s) for each in run.iterations] == [(4, 2.5), (5, 2.0)]
    assert run.unused_timers == {"allreduce N": 4}
    report = to_dict(to_report(run, tmp_path))
    assert (report["saves"][0]["tag"], report["saves"][0]["blocked_s"]) == ("ProfilerStep#4", 1.5)


def test_what_a_trace_does_not_tell_is_not_known(tmp_path: Path) -> None:
    """Whether an asynchronous save was written, or one after which nothing was recorded; the step outside of all."""
    events = [
        span("ProfilerStep#0", 0, 3), call(ASYNC_SAVE, 1, 0.5), span("save_checkpoint", 5, 1),
        call(SAVE, 0.5, 2, tid=8),
    ]  # fmt: skip
    run = read_profile(write(tmp_path / "trace.json", events), None)
    found = [(save.step, save.completed, save.scheduled) for save in run.saves]
    assert found == [(0, True, False), (0, None, True), (None, None, False)]
    assert run.iterations[0].step_s == 2.5  # a save on another thread is no part of it
    assert run.saves[-1].tag is None and run.loads == []
    report = to_dict(to_report(run, tmp_path))
    assert [save["outcome"] for save in report["saves"]] == ["ok", "unknown", "unknown"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("save_checkpoint", "save"), ("Saving ckpt 7", "save"), ("checkpoint_load", "load"),
        ("restore_checkpoint", "load"), ("state_dict save", "save"), ("activation checkpoint", None),
        ("save metrics", None), ("load batch", None), ("SaveCheckpoint", "save"), ("ckpt.restore", "load"),
        ("upload_checkpoint", None), ("dataloader.state_dict load", None), ("checkpoint payload check", None),
        ("activation checkpoint: save tensors", None), ("DataLoader.load_state_dict", None),
    ],
)  # fmt: skip
def test_the_programs_own_spans_are_known_by_their_names(tmp_path: Path, name: str, kind: str | None) -> None:
    run = read_profile(write(tmp_path / "trace.json", [span("ProfilerStep#0", 0, 3), span(name, 1, 1)]), None)
    assert (len(run.saves), len(run.loads)) == (kind == "save", kind == "load")
    assert sum(run.unused_timers.values()) == (kind is None)


STEP = span("ProfilerStep#0", 0, 1)
REFUSED = {
    "no list": ({"traceEvents": {}}, "it has no list traceEvents"),
    "a list": ([STEP], "it has no list traceEvents"),
    "nothing": ({"traceEvents": []}, "no step, save or load is visible in it: profile with a schedule"),
    "no time": ({"traceEvents": [STEP | {"ts": "1"}]}, "the span 'ProfilerStep#0' has no number ts"),
    "no duration": ({"traceEvents": [STEP | {"dur": float("nan")}]}, "has no number dur"),
    "rank": ({"traceEvents": [STEP], "distributedInfo": {"rank": "0"}}, "has no rank and number of ranks"),
    "rank of none": ({"traceEvents": [STEP], "distributedInfo": {"rank": 2, "world_size": 2}}, "is of rank 2 of 2"),
    "twice": ({"traceEvents": [STEP, STEP]}, "rank 0 has ProfilerStep#0 twice: give the traces of one launch"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_trace_is_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    data, message = REFUSED[name]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(data))
    assert main(["import", str(path), "--from", "profiler", "--world-size", "2"]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error and not (tmp_path / "trace-imported").exists()


def test_numbers_of_ranks_must_agree(tmp_path: Path) -> None:
    write(tmp_path / "a.json", [STEP], world_size=None)
    with pytest.raises(CouldNotRunError, match="no trace tells how many ranks ran: give --world-size N"):
        read_profile(tmp_path, None)
    write(tmp_path / "b.json", [STEP], rank=1)
    with pytest.raises(CouldNotRunError, match=r"--world-size 3: .*b.json says 2. Leave the flag out"):
        read_profile(tmp_path, 3)
    assert read_profile(tmp_path, 2).launched.world_size == 2
    write(tmp_path / "c.json", [STEP], rank=2, world_size=4)
    with pytest.raises(CouldNotRunError, match=r"b.json is of 2 ranks, .*c.json of 4: give the traces of one launch"):
        read_profile(tmp_path, None)


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"\x1f\x8b\x08damaged, yes", b"{", b"\xff" * 9])
def test_a_damaged_file_is_one_message(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(CouldNotRunError, match=r"trace.json: (is no trace of torch.profiler|cannot be read)"):
        read_profile(tmp_path / "trace.json", 2)


def test_a_directory_without_traces_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CouldNotRunError, match="give a Chrome trace of torch.profiler"):
            read_profile(path, 2)
