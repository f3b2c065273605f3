"""The restart drill over real trainings: real launchers, real faults, every cycle verified, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.dist.drill_reports import (
    LEAST_ACCOUNTED,
    assert_report_agrees,
    assert_restarts_agree,
    assert_timeline_agrees,
    report_of,
)
from tests.dist.harness import HANGS_S, LLAMA_STYLE, ROOT, processes_with, records, wait_for
from tests.dist.hold import held_environment
from tests.dist.storage import small_disk
from tests.dist.tiny_runs import NO_DROPOUT
from tests.own_shm import in_own_shm, left_in_shm

TRAINING = [
    *LLAMA_STYLE, "--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "96", "--num-attention-heads", "4",
    "--seq-length", "64", "--bf16", "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "30",
    "--lr", "1e-3", "--lr-decay-iters", "150", "--log-interval", "1", "--save-interval", "5", "--keep-last", "3",
    "--exit-signal-handler",
]  # fmt: skip
WITHOUT_HANDLER = [flag for flag in TRAINING if flag != "--exit-signal-handler"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
FORK = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2"]  # imports once, where torchrun does thrice
MARK = "RESTART_DRILL_TEST"
ALWAYS = 1000  # a matrix ends the last launch of a sequence itself
SEQUENCES = 3  # of the sample
HANG_LIMIT_S = 4
SAMPLED_FAULTS = ("sigkill-one", "sigkill-all", "sigkill-node", "sigstop", "exception", "device-error")
SAMPLED_POINTS = (
    "mid-step", "mid-save-write", "mid-save-before-commit", "mid-save-commit", "mid-load", "mid-startup",
)  # fmt: skip


def environment(out: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1", MARK: str(out)}


def drill(
    out: Path,
    dataset: list[str],
    fault: str,
    point: str,
    *options: str,
    training: tuple[str, ...] = (),
    faults: int = 1,
    launcher: list[str] = FORK,
) -> subprocess.CompletedProcess[str]:
    """Run the drill over a training of two DP ranks; nothing of it may be left.

    The ranks wait for each of its faults, so that none comes too late.
    """
    command = [*launcher, str(ROOT / "pretrain_gpt.py"), *dataset, *TRAINING, *training]
    argv = ["--fault", fault, "--at", point, "--out", str(out), "--quiet", "--time-limit", str(HANGS_S), *options]
    return run(out, "tools.restart_drill", *argv, "--", *command, held=faults)


def run(out: Path, module: str, *argv: str, held: int = 0) -> subprocess.CompletedProcess[str]:
    listing = out.with_name(f"{out.name}_shm")
    done = subprocess.run(
        in_own_shm([sys.executable, "-m", module, *argv], listing),
        env=environment(out) | held_environment(held), cwd=ROOT, capture_output=True, text=True, timeout=3 * HANGS_S,
    )  # fmt: skip
    assert left_of(out) == [] and left_in_shm(listing) == []
    return done


def left_of(out: Path) -> list[int]:
    """Processes that carry the mark of this drill."""
    return [process.pid for process in processes_with(MARK, str(out))]


@dataclass(frozen=True)
class Sample:
    """A sample of the matrix. Its reference run is as long as any drill here, and serves them too."""

    out: Path
    done: subprocess.CompletedProcess[str]

    @property
    def reference(self) -> list[str]:
        return ["--reference", str(self.out)]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory, dataset: list[str]) -> Sample:
    """The full one: python -m tools.restart_drill --matrix --out DIR; see docs/restart_drill.md.

    The seed draws each of these faults and injection points at least once, in three sequences: the faults of one
    sequence share the imports of its launches. torchrun's agent is tested in
    test_the_agent_restarts_the_ranks_in_place.
    """
    out = tmp_path_factory.mktemp("sample") / "matrix"
    command = [*FORK, str(ROOT / "pretrain_gpt.py"), *dataset, *WITHOUT_HANDLER, "--train-iters", "60"]
    options = ["--supervisors", "relaunch,launch", "--faults", ",".join(SAMPLED_FAULTS)]
    options += ["--injection-points", ",".join(SAMPLED_POINTS), "--sample", "8", "--seed", "216908"]
    options += ["--hang-limit", str(HANG_LIMIT_S)]
    done = run(out, "tools.restart_drill", "--matrix", "--out", str(out), *options, "--", *command, held=ALWAYS)
    return Sample(out, done)


def drilled(out: Path) -> dict[str, Any]:
    return json.loads((out / "drill.json").read_text())


def cycles(done: subprocess.CompletedProcess[str], out: Path) -> list[dict[str, Any]]:
    """The cycles of a drill, every one of which must be verified and accounted for."""
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = drilled(out)["cycles"]
    for cycle in found:
        assert_accounted(cycle)
    assert_report_agrees(out)
    return found


def assert_accounted(cycle: dict[str, Any]) -> None:
    assert cycle["verified"] and cycle["different"] == []
    if cycle["restart_s"] is not None:
        phases = cycle["phases"]
        assert sum(phases.values()) == pytest.approx(cycle["restart_s"])
        assert {"detect", "stop", "relaunch", "launcher", "imports", "load", "first_step"} <= set(phases)
        assert min(phases.values()) > -0.011, phases  # the kernel tells the start of a launcher to 10 ms
        assert cycle["accounted"] >= LEAST_ACCOUNTED, phases


def imports_s(out: Path, launch: int) -> float:
    """How long the first imports on rank 0 of a launch took: those of the launcher that forks it."""
    spans = [r for r in records(out / "trace", cycle=launch, rank=0) if r["type"] == "span"]
    return next(r["duration_ns"] for r in spans if r["phase"] == "imports") / 1e9


@pytest.mark.slow
def test_a_sample_of_the_matrix(sample: Sample) -> None:
    table = sample.done.stdout.find("| supervisor | engine |")  # behind what the reference run says
    assert sample.done.returncode == 0, sample.done.stdout[table:] + sample.done.stderr[-3000:]
    assert "8 of 8 cells verified" in sample.done.stdout
    assert (sample.out / "matrix.md").read_text() in sample.done.stdout
    told = json.loads((sample.out / "matrix.json").read_text())["cells"]
    assert [cell["verified"] for cell in told] == [True] * 8
    assert {cell["cell"]["fault"] for cell in told} == set(SAMPLED_FAULTS)
    assert {cell["cell"]["injection_point"] for cell in told} == set(SAMPLED_POINTS)
    assert len(sequences_of(sample)) == SEQUENCES


def sequences_of(sample: Sample) -> list[tuple[str, str]]:
    """(supervisor, engine) of each sequence."""
    told = json.loads((sample.out / "matrix.json").read_text())["cells"]
    return list(dict.fromkeys((cell["cell"]["supervisor"], cell["cell"]["engine"]) for cell in told))


@pytest.mark.slow
@pytest.mark.parametrize("sequence", range(SEQUENCES))
def test_every_cycle_is_verified_and_accounted_for(sample: Sample, sequence: int) -> None:
    """What drill.json and the report say of a sequence; its checkpoints are gone by then."""
    out = sample.out / f"sequence_{sequence:03d}"
    supervisor, engine = sequences_of(sample)[sequence]
    assert drilled(out)["supervisor"] == supervisor
    for number, cycle in enumerate(drilled(out)["cycles"]):
        assert_accounted(cycle)
        if cycle["fault"] == "sigkill-all":
            assert cycle["processes"] == 2
        if cycle["fault"] == "device-error":  # caught in the save, or it ends the rank, by where it was just then
            told = cycle["failed_save"] or "".join(log.read_text() for log in (out / "logs").iterdir())
            assert "AcceleratorError: an injected device error" in told
        assert cycle["resumed_step"] == cycle["expected_step"] and cycle["cache"] == "warm"
        if cycle["restart_s"] is None:  # the next fault came before its first step
            continue
        # A commit may win against the fault; then no iteration is repeated, and only the reference run can tell.
        assert (cycle["losses"], cycle["state_hashes"]) == ("identical", "equal")
        # Saves are five steps apart; beside one of engine lazy, and after one that fails, training goes on to the next:
        # with both, beside the one after that which failed.
        assert cycle["lost_steps"] <= 5 * (1 + (engine == "lazy") + (cycle["failed_save"] is not None))
        if supervisor == "relaunch":
            assert cycle["phases"]["imports"] >= imports_s(out, number + 1) > 0, "the launcher's imports have vanished"
        if cycle["fault"] == "sigstop":
            assert cycle["phases"]["detect"] >= HANG_LIMIT_S
    report = report_of(out)
    assert_restarts_agree(out, report)
    assert_timeline_agrees(out, report)


@pytest.mark.slow
@pytest.mark.nightly(minutes=3)
def test_a_signal_that_the_ranks_handle_costs_no_step(tmp_path: Path, dataset: list[str], sample: Sample) -> None:
    out = tmp_path / "drill"
    done = drill(out, dataset, "sigterm", "random:3", *sample.reference, "--checkpoint-engine", "torch")
    (cycle,) = cycles(done, out)
    assert (cycle["fault"], cycle["injection_point"], cycle["cache"]) == ("sigterm", "random:3", "warm")
    assert (cycle["losses"], cycle["state_hashes"]) == ("identical", "equal")
    assert cycle["exit_code"] == 0 and cycle["lost_steps"] == 0
    assert cycle["resumed_step"] == cycle["expected_step"]
    assert "yes" in done.stdout
    told = drilled(out)
    assert "no reference run" not in told["losses_compared_with"], told
    assert told["reference"] == str(sample.out / "reference")
    assert not (out / "reference").exists()


@pytest.mark.slow
def test_the_agent_restarts_the_ranks_in_place(tmp_path: Path, dataset: list[str], sample: Sample) -> None:
    out = tmp_path / "drill"
    options = ["--supervisor", "torchrun", "--checkpoint-engine", "lazy", *sample.reference]
    (cycle,) = cycles(drill(out, dataset, "exception", "mid-step", *options, launcher=TORCHRUN), out)
    assert drilled(out)["supervisor"] == "torchrun"
    assert "InjectedFault: an injected exception" in (out / "logs" / "cycle_000.log").read_text()
    assert [path.name for path in sorted((out / "logs").iterdir())] == ["cycle_000.log"]  # one launch
    assert cycle["exit_code"] is None and (cycle["losses"], cycle["state_hashes"]) == ("identical", "equal")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "point", "options", "tier"),
    [
        ("sigkill-one", "mid-save-write", ["--supervisor", "launch", "--cycles", "2"], "local_memory"),
        pytest.param("bitflip", "after-commit", ["--supervisor", "launch"], None, marks=pytest.mark.nightly(minutes=3)),
        pytest.param("sigkill-launcher", "mid-step", [], "storage", marks=pytest.mark.nightly(minutes=3)),
    ],
)
def test_saves_in_memory_outlive_the_ranks_and_not_the_launcher(
    tmp_path: Path, dataset: list[str], sample: Sample, fault: str, point: str, options: list[str], tier: str | None
) -> None:
    """Every iteration is saved, each fourth goes to storage, too.

    Where a slot is damaged, the next save may be on its way into the other one: then storage is what is left.
    """
    out = tmp_path / "drill"
    faults = 2 if "--cycles" in options else 1
    engine = ["--checkpoint-engine", "memory", "--persist-interval", "4", *sample.reference]
    training = ("--save-interval", "1") if "launch" in options else ("--save-interval", "2")
    training = (*WITHOUT_HANDLER, *training)
    done = drill(out, dataset, fault, point, *engine, *options, training=training, faults=faults)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = drilled(out)["cycles"]
    assert len(found) == faults
    for cycle in found:
        assert (cycle["verified"], cycle["losses"], cycle["state_hashes"]) == (True, "identical", "equal")
        assert cycle["tier"] == cycle["expected_tier"] and cycle["resumed_step"] == cycle["expected_step"]
        assert cycle["tier"] == tier or (tier is None and cycle["tier"] in ("local_memory", "storage"))
        saves_each = 1 if cycle["tier"] == "local_memory" else 4
        assert cycle["lost_at_most"] == saves_each * int(training[-1])
    assert f"from {found[0]['tier'].replace('_', ' ')} " in done.stdout and "lost at most" in done.stdout
    if fault == "bitflip":
        assert found[0]["damaged"].startswith("slot ") and found[0]["damaged"].endswith(" of host memory")
    if fault == "sigkill-launcher":
        assert (found[0]["processes"], found[0]["exit_code"]) == (1, -9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "point"),
    [
        ("sigkill-one", "mid-return"),
        pytest.param("sigstop", "mid-return", marks=pytest.mark.nightly(minutes=3)),
        pytest.param("exception", "mid-load", marks=pytest.mark.nightly(minutes=3)),
    ],
)
def test_ranks_that_live_return(tmp_path: Path, dataset: list[str], fault: str, point: str) -> None:
    """Of four, of which one is killed, and another one has the fault while it returns, or after."""
    out = tmp_path / "drill"
    options = ["--supervisor", "in-process", "--checkpoint-engine", "torch", "--no-reference"]
    training, faults = ("--tensor-model-parallel-size", "2"), 1 + (point == "mid-load")
    done = drill(out, dataset, fault, point, *options, training=training, faults=faults, launcher=[*FORK[:-1], "4"])
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    last = drilled(out)["cycles"][-1]
    assert (last["verified"], last["state_hashes"]) == (True, "equal")
    report = report_of(out)
    returned = [len(start.returned_ranks or ()) for start in report.restarts]
    # One that waits for the rest of a message of a killed rank cannot return, and says so.
    before_restart = (out / "logs" / "cycle_000.log").read_text().partition(": restart 1 of ")[0]
    ended = before_restart.count(" ends instead of starting again in its process: ")
    assert returned[0] + ended == (2 if point == "mid-return" else 3)
    assert_restarts_agree(out, report)


@pytest.mark.slow
@pytest.mark.nightly(minutes=3)
def test_a_full_disk_fails_the_save_by_name(tmp_path: Path, dataset: list[str]) -> None:
    with small_disk(tmp_path / "disk", 48 << 20) as mounted:
        if not mounted:
            pytest.skip("no file system may be mounted here: run as root, with CAP_SYS_ADMIN")
        out, checkpoints = tmp_path / "drill", tmp_path / "disk" / "run"
        options = ["--checkpoints", str(checkpoints), "--checkpoint-engine", "torch", "--no-reference"]
        (cycle,) = cycles(drill(out, dataset, "disk-full", "mid-step", *options), out)
        assert "No space left on device" in cycle["failed_save"]
        assert cycle["iteration"] > cycle["expected_step"] == cycle["resumed_step"]
        assert [path.name for path in checkpoints.glob(".*")] == [".generations"]
        room = os.statvfs(checkpoints)
        assert room.f_bfree > room.f_blocks // 2


@pytest.mark.slow
def test_another_layout_after_the_fault(tmp_path: Path, dataset: list[str]) -> None:
    """A bit of the newest checkpoint is flipped, too: it is named, and none of it comes into the other layout."""
    out = tmp_path / "drill"
    options = ["--resume-tp", "2", "--resume-dp", "1", "--checkpoint-engine", "lazy", "--cold-cache"]
    training = (*NO_DROPOUT, "--train-iters", "16")
    (cycle,) = cycles(drill(out, dataset, "bitflip", "after-commit", *options, training=training), out)
    damaged = Path(cycle["damaged"])
    assert damaged.is_relative_to(out / "checkpoints") and damaged.parent.name == "global_step10"
    assert cycle["resumed_step"] == cycle["expected_step"] == 5
    assert f"checkpoint passed over: {damaged}: " in (out / "logs/cycle_001.log").read_text()
    assert cycle["cache"] in ("cold", "warm") and cycle["phases"]["drill"] > 0
    assert cycle["layout"] == [2, 1, 1] and cycle["losses"] == "within 0.02 relative"
    assert cycle["state_hashes"] == "not compared: saved on another layout"
    assert "reshard" in (out / "trace" / "rank_00000_cycle_001.jsonl").read_text()
    assert drilled(out)["reference"] == str(out / "reference")  # with dropout off it is another training's


def test_what_cannot_be_drilled_is_said(tmp_path: Path, dataset: list[str], sample: Sample) -> None:
    """Before anything is launched."""

    def refused(name: str, *options: str, fault: str = "sigkill-all", training: tuple[str, ...] = ()) -> str:
        done = drill(tmp_path / name, dataset, fault, "mid-step", *options, training=training, launcher=TORCHRUN)
        assert done.returncode == 2 and not (tmp_path / name / "logs" / "cycle_000.log").exists()
        return done.stderr

    assert "--hidden-size 65" in refused("a", training=("--hidden-size", "65"))
    assert "--resume-tp 3 --resume-pp 1 --resume-dp 2: " in refused("b", "--resume-tp", "3")
    assert "with --exit-signal-handler the ranks save" in refused("c", "--supervisor", "torchrun", fault="sigterm")
    assert "is on the same file system as" in refused("d", fault="disk-full")
    told = refused("f", *sample.reference, training=("--seed", "7"))
    assert f"--reference {sample.out}: is of another training: --seed 1234 there, and 7 here" in told
    done = run(tmp_path / "e", "tools.restart_drill", "--fault", "sigterm", "--at", "mid-step", "--out",
               str(tmp_path / "e"), "--supervisor", "torchrun", "--", "sleep", "9")  # fmt: skip
    assert done.returncode == 2 and "the command does not start torchrun" in done.stderr


def test_what_goes_wrong_is_said(tmp_path: Path, dataset: list[str]) -> None:
    """Three times of a job that only says that it has trained."""

    def refused(name: str, point: str, words: str, *options: str) -> str:
        out = tmp_path / name
        argv = ["--fault", "sigkill-all", "--at", point, "--out", str(out), "--quiet", "--no-reference", *options]
        done = run(out, "tools.restart_drill", *argv, "--", sys.executable, "-c", TRAINS_THREE + words)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr

    told = refused("a", "iteration:3", "")
    assert "error: --at iteration:3: no checkpoint was committed before" in told
    told = refused("b", "iteration:500", "")
    assert "ended with exit code 0 before the injection point iteration:500" in told
    told = refused("c", "iteration:25", "time.sleep(600)", "--time-limit", "1")
    assert "was not reached within 1 s; raise --time-limit" in told


TRAINS_THREE = """
import json, pathlib, sys, time
trace = pathlib.Path(sys.argv[sys.argv.index("--restart-trace-dir") + 1])
trace.mkdir(parents=True, exist_ok=True)
records = [{"type": "iteration", "step": step, "start_ns": 0, "end_ns": 1} for step in (1, 2, 3)]
(trace / "rank_00000_cycle_000.jsonl").write_text("".join(json.dumps(record) + "\\n" for record in records))
"""


def test_a_job_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    argv = ["--fault", "sigkill-all", "--at", "mid-step", "--out", str(tmp_path / "c"), "--quiet", "--no-reference"]
    ends = "raise SystemExit('no data at /no/such')"
    done = run(tmp_path / "c", "tools.restart_drill", *argv, "--", sys.executable, "-c", ends)
    assert done.returncode == 2 and "before the injection point mid-step; see its log" in done.stderr
    assert "/no/such" in (tmp_path / "c" / "logs" / "cycle_000.log").read_text()


def test_stopping_the_drill_stops_the_job(tmp_path: Path, dataset: list[str]) -> None:
    out = tmp_path / "drill"
    command = [*FORK, str(ROOT / "pretrain_gpt.py"), *dataset, *TRAINING]
    argv = ["--fault", "sigterm", "--at", "iteration:99", "--out", str(out), "--quiet", "--", *command]
    running = subprocess.Popen(
        [sys.executable, "-m", "tools.restart_drill", *argv],
        env=environment(out), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: bool(list((out / "trace").glob("rank_*"))), "a rank")
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=HANGS_S)
    assert running.returncode == 2 and "stopped by signal SIGTERM" in errors
    assert left_of(out) == []
