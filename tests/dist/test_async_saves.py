"""Asynchronous saves: training goes on while files are written and committed, and none of it shows in them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.parallel.topology import Layout
from tests.dist.async_runs import ASYNC, SCRIPT, TINY_RUN, committed, run, save_ends, spans_of, train
from tests.dist.harness import HANGS_S, LLAMA_STYLE, ROOT, Zygote, losses, records, wait_for
from tests.dist.test_commit_protocol import TWO
from tests.dist.tiny_runs import (
    DROPOUT,
    MODEL,
    PRECISIONS,
    RECOMPUTE,
    SINGLE,
    TRAINING,
    Launcher,
    assert_same_checkpoint,
    from_iteration,
    losses_of_ranks,
    parallel,
    saving,
)
from tests.dist.trace_runs import BIG, PAIR
from tools.restart_drill.injection_points import TraceTail

SHARDED = Layout(tp=2, pp=2, dp=1)
REPLICAS = Layout(tp=1, pp=1, dp=2)
STAGES = Layout(tp=1, pp=2, dp=2)
COMMIT_THREAD = "ckpt-commit"


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


# ---------------------------------------------------------------- what is recorded


def test_training_goes_on_while_a_save_is_written_and_the_next_save_waits_for_it(launcher: Launcher) -> None:
    save = launcher.directory / "run"
    finished = train(launcher, TWO, *TINY_RUN, "--train-iters", "6", *saving(save, 4), env={"SLOW_DELAY": "waited"})
    for rank in range(TWO.world_size):
        first, last = save_ends(save, rank)
        assert (first["step"], last["step"]) == (4, 6)
        assert {first["outcome"], last["outcome"]} == {"ok"} and first["durable"] and first["bytes"] > 10_000
        mine = [r for r in records(save / "restart_trace", rank=rank) if r["type"] == "iteration"]
        during = [r["step"] for r in mine if first["start_ns"] < r["start_ns"] and r["end_ns"] < first["end_ns"]]
        assert during == [5, 6]
        check_background_of(spans_of(save, first), rank)
        check_that_saves_do_not_overlap(save, first, last)
        # The end of training waits for the last one, which is a part of that save.
        waits = [s for s in spans_of(save, last) if s["phase"] == "wait_previous"]
        assert len(waits) == 2 and waits[1]["blocking"] and waits[1]["end_ns"] <= last["end_ns"]
        written = [s for s in spans_of(save, last) if s["phase"] == "flush" and s.get("file") != "delay"]
        assert written and all(waits[1]["start_ns"] < s["start_ns"] < waits[1]["end_ns"] for s in written)
    assert committed(save) == ["global_step4", "global_step6"]
    log = finished.log(0)
    assert re.search(
        r"checkpoint of iteration 4 committed to \S+: training was blocked \d+\.\d+ s, durable after \d+\.\d+ s", log
    )
    assert re.search(r"checkpoint of iteration 6 committed to", log) and "saved checkpoint" not in log


def check_background_of(spans: list[dict[str, Any]], rank: int) -> None:
    """What of a save during training blocked it, and what did not."""
    blocking = {(s["phase"], s["thread"]) for s in spans if s["blocking"]}
    assert blocking == {
        (phase, "MainThread") for phase in ("collect", "make_directory", "device_to_host", "serialize")
    }  # serialize: the hashes of --verify-restored-state
    background = {(s["phase"], s["thread"]) for s in spans if not s["blocking"]}
    expected = {("flush", "slow-writer"), ("barrier", COMMIT_THREAD), ("flush", COMMIT_THREAD)}
    assert background >= expected | ({("commit", COMMIT_THREAD)} if rank == 0 else set())


def check_that_saves_do_not_overlap(save: Path, first: dict[str, Any], last: dict[str, Any]) -> None:
    spans = spans_of(save, last)
    waited, collected = (next(s for s in spans if s["phase"] == phase) for phase in ("wait_previous", "collect"))
    assert waited["blocking"] and waited["thread"] == "MainThread"
    assert last["start_ns"] < first["end_ns"] <= waited["end_ns"] <= collected["start_ns"]


def test_blocking_spans_account_for_the_time_that_training_waits(launcher: Launcher) -> None:
    """Of the begin of a save, on a model whose state takes a while to copy."""
    save = launcher.directory / "run"
    env = {"SLOW_COPY": "begin", "SLOW_DELAY": "0.2"}
    flags = [*BIG, "--num-layers", "4", "--train-iters", "3", "--save", save, "--save-interval", "2"]
    gaps: list[float] = []  # seconds that are in no span
    allowed = 0.0
    while not gaps or gaps[-1] > allowed:  # what the scheduler takes is not left out every time
        assert len(gaps) < 8, f"{gaps} s of the time are in no blocking span"
        again = ["--start-over", f"try_{len(gaps)}", "--allow-other-checkpoints"]  # those of the tries before
        finished = train(launcher, PAIR, *flags, *again, "--restart-trace-dir", save / "restart_trace", env=env)
        waited = re.search(r"iteration 2 committed to \S+ training was blocked (\S+) s", finished.log(0))
        assert waited
        end = save_ends(save, cycle=len(gaps))[0]
        named = sum(s["duration_ns"] for s in spans_of(save, end) if s["blocking"])
        assert named / 1e9 < float(waited[1]) + 0.001 and end["end_ns"] - end["start_ns"] > named + 0.2e9
        gaps.append(float(waited[1]) - named / 1e9)
        allowed = max(0.02 * float(waited[1]), 0.05)


# ---------------------------------------------------------------- what is saved


# fp32 has the optimizer of fp16, without its loss scale.
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.nightly(minutes=1))])
def test_nothing_saved_changes_until_it_is_released(launcher: Launcher, precision: str) -> None:
    """Forward, backward, the reduction of tied gradients and evaluation in between: the engine compares bit by bit."""
    save = launcher.directory / "run"
    flags = [*MODEL, *TRAINING, *DROPOUT, *RECOMPUTE, *PRECISIONS[precision], "--train-iters", "4"]
    flags += saving(save, 1)
    evaluating = ["--split", "80,20,0", "--eval-iters", "1", "--eval-interval", "100"]
    finished = train(launcher, STAGES, *flags, *evaluating, env={"EVALUATE": "1"})
    assert finished.output.count("validation loss at iteration") >= 3
    for rank in range(STAGES.world_size):
        assert [end["outcome"] for end in save_ends(save, rank)] == ["ok"] * 4
        released = [s for end in save_ends(save, rank) for s in spans_of(save, end) if s["phase"] == "device_to_host"]
        assert sum(s["blocking"] for s in released) == 8  # four that began and four that were released


@pytest.mark.parametrize(
    "layout",
    [SHARDED, pytest.param(REPLICAS, marks=pytest.mark.nightly(minutes=1))],
    ids=lambda layout: str(layout).replace(" ", ""),
)
def test_resumed_run_equals_uninterrupted_one(launcher: Launcher, layout: Layout) -> None:
    """With a flush longer than several iterations, which change every tensor that is being written."""
    whole, resumed = launcher.directory / "whole", launcher.directory / "resumed"
    model = [*MODEL, *LLAMA_STYLE, "--num-key-value-heads", "2"]
    flags = [*model, *TRAINING, *DROPOUT, "--bf16", "--train-iters", "5"]
    train(launcher, layout, *flags, *saving(whole, 3), env={"SLOW_DELAY": "waited"})
    ended = [r for r in records(whole / "restart_trace", rank=0) if r["type"] == "iteration"]
    assert ended[3]["end_ns"] < save_ends(whole)[0]["end_ns"]  # iteration 4 was done before 3 was committed
    train(launcher, layout, *flags, *saving(resumed, 3), "--load", whole, "--load-tag", "global_step3")
    expected = losses_of_ranks(whole, layout)
    assert [list(mine) for mine in expected] == [list(range(1, 6))] * layout.world_size
    assert losses_of_ranks(resumed, layout) == from_iteration(expected, 4)
    assert_same_checkpoint(whole / "global_step5", resumed / "global_step5")
    synchronous = launcher.directory / "synchronous"
    launcher.train(layout, *flags, *saving(synchronous, 3), "--exit-interval", "3")
    assert_same_checkpoint(whole / "global_step3", synchronous / "global_step3")


# ---------------------------------------------------------------- failures


def test_failure_of_one_rank_is_told_to_all_and_training_goes_on(launcher: Launcher) -> None:
    save = launcher.directory / "run"
    env = {"SLOW_FAIL": json.dumps({"2": [1, 1]}), "SLOW_DELAY": "0.05"}
    finished = train(launcher, TWO, *TINY_RUN, "--train-iters", "4", *saving(save, 1), env=env)
    reason = "checkpoint global_step2 was not saved: rank 1: IndexError: a broken engine"
    for rank in range(TWO.world_size):
        outcomes = {end["step"]: end.get("error", "ok") for end in save_ends(save, rank)}
        assert outcomes == {1: "ok", 2: f"CheckpointSaveError: {reason}", 3: "ok", 4: "ok"}
    assert f"{reason}; the previous checkpoint is untouched and training goes on" in finished.log(0)
    assert committed(save) == ["global_step1", "global_step3", "global_step4"]
    assert not list(save.glob(".incomplete*"))


def test_save_that_failed_last_is_tried_again_at_the_end(launcher: Launcher) -> None:
    """All ranks wait for the outcome before they decide whether that iteration is saved already."""
    save = launcher.directory / "run"
    env = {"SLOW_FAIL": json.dumps({"4": [1, 1]}), "SLOW_DELAY": "[0.0, 0.3]"}
    train(launcher, TWO, *TINY_RUN, "--train-iters", "4", *saving(save, 2), env=env)
    for rank in range(TWO.world_size):
        assert [(e["step"], e["outcome"]) for e in save_ends(save, rank)] == [(2, "ok"), (4, "failed"), (4, "ok")]
    assert committed(save) == ["global_step2", "global_step4"]


def test_exit_code_tells_that_the_last_save_failed(launcher: Launcher) -> None:
    save = launcher.directory / "run"
    flags = [*TINY_RUN, "--train-iters", "4", *saving(save, 2), "--load", save]
    train(launcher, TWO, *flags, "--exit-interval", "2")
    before = {str(path): path.read_bytes() for path in save.rglob("global_step*/*")}
    finished = run(launcher, TWO, *flags, env={"SLOW_FAIL": json.dumps({"4": [0, 9]})})
    assert finished.exit_codes == [1, 1]
    assert {str(path): path.read_bytes() for path in save.rglob("global_step*/*")} == before
    again = train(launcher, TWO, *flags)
    assert "resumed from iteration 2" in again.output and committed(save) == ["global_step2", "global_step4"]


def test_training_ends_when_no_save_can_be_agreed_on_any_more(launcher: Launcher) -> None:
    """On all ranks, long before its end, though each is there: a connection that timed out does not come back."""
    save = launcher.directory / "run"
    flags = [*TINY_RUN, "--train-iters", "5000", *saving(save, 2)]
    finished = run(launcher, TWO, *flags, env={"LOSE_AT": "4"})
    assert finished.exit_codes == [1, 1]
    # A rank that has not asked yet may hear of it by a collective of training that the other one has left.
    assert ": the ranks can no longer agree on checkpoints" in finished.output
    for rank in range(TWO.world_size):
        assert [end["outcome"] for end in save_ends(save, rank)][:2] == ["ok", "failed"]
        assert max(losses(save / "restart_trace", rank=rank)) < 1000
    assert "Timed out waiting for another rank; the previous checkpoint is untouched" not in finished.log(0)
    assert committed(save) == ["global_step2"]


def test_a_rank_that_only_the_commit_waits_for_is_named(launcher: Launcher) -> None:
    """Its save does not end, and it trains on, as all do. On a machine that is too busy for so few minutes: more."""
    named = r"rank 1 on \S+ has been in save global_step2 flush write delay for \S+ s"
    for minutes in ("0.1", "0.5", "3"):
        save = launcher.directory / minutes
        flags = [*TINY_RUN, "--train-iters", "6", *saving(save, 2), "--distributed-timeout-minutes", minutes]
        finished = run(launcher, TWO, *flags, env={"SLOW_DELAY": json.dumps({"2": [0, 600]})})
        found = re.findall(r"^error on rank \d, .*--distributed-timeout-minutes.*", finished.output, re.MULTILINE)
        if len(found) == 2 and all(re.search(named, line) for line in found):
            break
    else:
        pytest.fail(finished.output)
    assert finished.exit_codes == [1, 1] and committed(save) == []


# ---------------------------------------------------------------- the end of training


def test_sigterm_waits_for_the_save(launcher: Launcher) -> None:
    save = launcher.directory / "run"

    def terminate(pids: list[int]) -> None:
        tail = TraceTail(save / "restart_trace", 0)
        wait_for(lambda: any(r["type"] == "iteration" for r in tail.new_records()), "the first iteration")
        for pid in pids:
            os.kill(pid, signal.SIGTERM)

    flags = [*TINY_RUN, "--train-iters", "5000", *saving(save, 5000), "--exit-signal-handler"]
    finished = train(launcher, TWO, *flags, env={"SLOW_DELAY": "waited"}, during=terminate)
    (end,) = save_ends(save)
    assert end["outcome"] == "ok" and committed(save) == [end["tag"]]
    assert f"waiting for the checkpoint of iteration {end['step']}" in finished.log(0)


def test_error_in_training_lets_a_save_be_committed(launcher: Launcher) -> None:
    save = launcher.directory / "run"
    flags = [*TINY_RUN, "--train-iters", "6", *saving(save, 3), "--load", save]
    finished = run(launcher, TWO, *flags, env={"SLOW_DELAY": "0.5", "RAISE_AT": "4"})
    assert finished.exit_codes == [1, 1] and "training met an error" in finished.output
    assert committed(save) == ["global_step3"]
    again = train(launcher, TWO, *flags)
    assert "resumed from iteration 3" in again.output


def test_error_in_training_does_not_wait_for_storage_that_hangs(dataset: list[str], tmp_path: Path) -> None:
    """In a process of its own, which has to get through the interpreter's own shutdown, too."""
    save = tmp_path / "run"
    flags = [*TINY_RUN, *parallel(SINGLE), "--train-iters", "6", *saving(save, 3), *ASYNC]
    env = os.environ | {"SLOW_DELAY": "600", "RAISE_AT": "5", "DRAIN_S": "0.5", "PYTHONPATH": str(ROOT)}
    env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, SCRIPT, *dataset, *flags],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANGS_S,  # half of what the storage would take
    )
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "RuntimeError: training met an error" in finished.stderr
    assert "the checkpoint of iteration 3 was not committed within 0.5 s" in finished.stdout + finished.stderr
    assert committed(save) == [] and len(list(save.glob(".incomplete_global_step3*"))) == 1


# ---------------------------------------------------------------- which engine loads


def load_engines(trace: Path, cycle: int) -> set[str]:
    ends = [r for r in records(trace, cycle) if r["type"] == "operation_end" and r["operation"] == "load"]
    return {end["engine"] for end in ends}


def test_files_are_read_by_the_engine_that_wrote_them(launcher: Launcher) -> None:
    """Whatever --checkpoint-engine says for saving; the trace names the class that read."""
    save = launcher.directory / "run"
    trace = save / "restart_trace"
    flags = [*TINY_RUN, "--train-iters", "6", *saving(save, 1), "--load", save]
    train(launcher, TWO, *flags, "--exit-interval", "1")
    launcher.train(TWO, *flags, "--exit-interval", "2", script=SCRIPT)
    assert load_engines(trace, 1) == {"SlowAsyncEngine"}
    assert [(end["step"], end["engine"]) for end in save_ends(save, cycle=1)] == [(2, "TorchEngine")]
    manifests = [json.loads((save / f"global_step{step}" / "manifest.json").read_text()) for step in (1, 2)]
    assert [manifest["engine"] for manifest in manifests] == ["slow-async", "torch"]
    train(launcher, TWO, *flags, "--exit-interval", "3")
    assert load_engines(trace, 2) == {"TorchEngine"}


def test_engine_that_is_not_there_is_named(launcher: Launcher) -> None:
    save = launcher.directory / "run"
    flags = [*TINY_RUN, "--train-iters", "6", *saving(save, 1), "--load", save]
    train(launcher, TWO, *flags, "--exit-interval", "1")
    finished = launcher.run(TWO, *flags, "--exit-interval", "2")
    assert finished.exit_codes == [2, 2]
    error = finished.log(0)
    assert (
        f"error: {save}/global_step1/manifest.json: the checkpoint was saved with --checkpoint-engine slow-async"
        in error
    )
    assert "no such engine; there are: torch" in error and "--load-tag" in error
    assert committed(save) == ["global_step1"]
