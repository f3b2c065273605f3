"""Every engine through real training: killed in the middle of anything, resumed to the same bits."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron.checkpointing.engines.registry import engine_class
from megatron.checkpointing.store.manifest import Manifest
from megatron.parallel.topology import Layout
from tests.conformance.subjects import ENVIRONMENT, engines_under_test
from tests.dist.harness import HANGS_S, LLAMA_STYLE, Run, Zygote, kill_all, losses, records, wait_for
from tests.dist.hold import HELD_TRAINING
from tests.dist.tiny_runs import (
    DROPOUT,
    MODEL,
    RECOMPUTE,
    TRAINING,
    Launcher,
    assert_same_checkpoint,
    buffered_saving,
    hashes,
    losses_of_ranks,
    saving,
)

ENGINES = engines_under_test()
# --checkpoint-engine, and flags after it: where ranks share files, they depend on each other before they write.
COMPRESSED = "lazy --checkpoint-compression zstd"
OF_LAZY = ["lazy --checkpoint-files-per-node 1", COMPRESSED]
WITH_SHARED = (*ENGINES, *(OF_LAZY if "lazy" in ENGINES else []))
FOUR = Layout(tp=1, pp=2, dp=2)  # stages hold other layers, replicas other partitions
TWO = Layout(tp=1, pp=1, dp=2)
LLAMA = [*MODEL, *LLAMA_STYLE, "--num-key-value-heads", "2", *TRAINING, *DROPOUT, *RECOMPUTE, "--bf16"]
ITERATIONS = ["--train-iters", "60"]
LAST = 6
# Whose writers tests/faults/test_sweep.py kills at their system calls, and which have no agreement of their own.
KILLED_IN_SWEEP = () if ENVIRONMENT in os.environ else ("fastpersist-decoupled", "torchsnapshot", "dcp-async")
# What differs between engines on four ranks is which files there are and who writes them: three kinds of it. Kills over
# two ranks are with every engine below. A compressed file is one of lazy's until it is closed.
NIGHTLY = () if ENVIRONMENT in os.environ else (*(set(ENGINES) - {"torch", "lazy"}), COMPRESSED)
# Some 4 MB per rank and next to no arithmetic. Where a save must take longer than an iteration, it is held.
LARGE = [
    *LLAMA_STYLE, *DROPOUT, "--num-layers", "2", "--hidden-size", "128", "--ffn-hidden-size", "256",
    "--num-attention-heads", "4", "--num-key-value-heads", "2", "--seq-length", "16", "--bf16",
    "--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "1e-3", "--lr-warmup-iters", "4",
    "--lr-decay-style", "cosine", "--min-lr", "1e-4", "--log-interval", "1",
]  # fmt: skip
SCRIPTS = Path(__file__).with_name("scripts")


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


@pytest.fixture(scope="module")
def module_launcher(zygote: Zygote, dataset: list[str], tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(zygote, dataset, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def reference(module_launcher: Launcher) -> Path:
    """A training of four ranks that nothing interrupts: no engine changes its losses or its state."""
    save = module_launcher.directory / "four"
    module_launcher.train(FOUR, *LLAMA, *ITERATIONS, *buffered_saving(save, LAST), "--exit-interval", str(LAST))
    return save


@pytest.fixture(scope="module")
def expected_losses(module_launcher: Launcher) -> dict[int, float]:
    """Of two ranks with the large model and never a save."""
    trace = module_launcher.directory / "two"
    flags = [*LARGE, *ITERATIONS, "--restart-trace-dir", trace, "--exit-interval", "12"]
    module_launcher.train(TWO, *flags)
    return losses(trace)


def resumed_from(run: Run) -> int:
    found = re.findall(r"resumed from iteration (\d+)", run.output)
    assert found, f"no checkpoint was loaded:\n{run.output[-4000:]}"
    return int(found[0])


def committed(save: Path) -> int:
    """Step of the newest checkpoint; 0 without one."""
    tracker = save / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text() or 0) if tracker.exists() else 0


def kill_with_helpers(pids: list[int]) -> None:
    """SIGKILL the ranks; processes that they had started must end by themselves."""
    helpers = [child for pid in pids for child in psutil.Process(pid).children(recursive=True)]
    kill_all(pids)
    _, left = psutil.wait_procs(helpers, timeout=HANGS_S)
    for helper in left:
        helper.kill()
    assert not left, f"left behind by ranks that were killed: {left}"
    shared = [p.name for p in Path("/dev/shm").iterdir() if any(str(pid) in re.split(r"\D", p.name) for pid in pids)]
    assert not shared, f"left behind in /dev/shm: {shared}"


@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=pytest.mark.nightly(minutes=2) if name in NIGHTLY else ()) for name in WITH_SHARED],
)
def test_killed_and_resumed_on_four_ranks(launcher: Launcher, reference: Path, engine: str) -> None:
    """PP2 DP2, SIGKILL at no chosen instant; every loss and every tensor of every rank is as without it.

    The ranks train no further than to iteration 5, so that it cannot come when everything is saved.
    """
    save = launcher.directory / "run"
    flags = [*LLAMA, *ITERATIONS, *buffered_saving(save, 2), "--checkpoint-engine", *engine.split()]

    def kill_once_a_checkpoint_is_there(pids: list[int]) -> None:
        there = lambda: committed(save) > 0 and 3 in losses(save / "restart_trace")  # noqa: E731
        wait_for(there, "a checkpoint")
        kill_with_helpers(pids)

    held = {"HELD_CYCLES": "1", "HELD_AFTER": str(LAST - 1)}
    run = launcher.run(FOUR, *flags, during=kill_once_a_checkpoint_is_there, script=HELD_TRAINING, env=held)
    assert run.exit_codes == [-9] * FOUR.world_size, run.output[-4000:]
    last_committed = committed(save)
    assert last_committed < LAST, f"it had saved {last_committed} already when it was killed: nothing is shown"
    resumed = launcher.train(FOUR, *flags, "--load", save, "--exit-interval", str(LAST))
    first = resumed_from(resumed)
    assert last_committed <= first <= last_committed + 2  # a rename may have gone before its tracker
    assert "passed over" not in resumed.output
    expected = losses_of_ranks(reference, FOUR)
    again = losses_of_ranks(save, FOUR, cycle=1)
    assert again == [{step: mine[step] for step in range(first + 1, LAST + 1)} for mine in expected]
    before = losses_of_ranks(save, FOUR, cycle=0)[0]
    assert {step: loss for step, loss in before.items() if step <= LAST}.items() <= expected[0].items()
    tag = f"global_step{LAST}"
    assert hashes(save / tag, FOUR) == hashes(reference / tag, FOUR)
    assert Manifest.from_json((save / tag / "manifest.json").read_text()).engine == engine.split()[0]
    if engine == "torch":  # as the reference: so what has no hash can be compared, too
        assert_same_checkpoint(save / tag, reference / tag)


@dataclass
class Job:
    """A job of two ranks that is started again and again with one engine."""

    launcher: Launcher
    engine: str
    save: Path
    cycle: int = -1
    resumed: list[int] = field(default_factory=list)

    def start(self, *more: str, engine: str | None = None, **options: Any) -> Run:
        """Start once more; the step that it resumed from is added to `resumed`."""
        self.cycle += 1
        chosen = (engine or self.engine).split()
        flags = [*LARGE, *ITERATIONS, *saving(self.save, 1), "--checkpoint-engine", *chosen]
        run = self.launcher.run(TWO, *flags, "--load", self.save, *more, **options)
        if self.cycle:
            self.resumed.append(resumed_from(run))
        assert "passed over" not in run.output, run.output[-4000:]
        return run

    def finish(self, step: int, engine: str | None = None, **options: Any) -> Run:
        run = self.start("--exit-interval", str(step), engine=engine, **options)
        assert run.ok, f"{self.engine}: {run.exit_codes}:\n{run.output[-6000:]}"
        return run

    def check_losses(self, expected: dict[int, float]) -> None:
        for cycle in range(self.cycle + 1):
            mine = losses(self.save / "restart_trace", cycle)
            assert mine and mine.items() <= expected.items(), f"cycle {cycle}"


@pytest.fixture
def job(launcher: Launcher, request: pytest.FixtureRequest) -> Job:
    return Job(launcher, request.param, launcher.directory / "run")


def unfinished(save: Path, step: int) -> list[Path]:
    return sorted(save.glob(f".incomplete_global_step{step}_*"))


def kill_while_writing(job: Job, step: int) -> None:
    """Kill both ranks once there is something of the checkpoint of `step`, which one of them never says is written."""

    def writing() -> bool:
        return any(path.stat().st_size for found in unfinished(job.save, step) for path in files_in(found))

    def harm(pids: list[int]) -> None:
        wait_for(writing, f"a file of step {step}")
        kill_with_helpers(pids)

    hanging = {"KILL_STEP": str(step), "KILL_RANK": "1", "KILL_ENGINE": job.engine.split()[0], "HANG": "1"}
    run = job.start(during=harm, script=str(SCRIPTS / "killed_when_written.py"), env=hanging)
    assert run.exit_codes == [-9, -9], run.output[-4000:]
    (left,) = unfinished(job.save, step)
    assert not (left / "manifest.json").exists(), "it was killed too late"


def files_in(directory: Path) -> list[Path]:
    try:
        return [path for path in directory.rglob("*") if path.is_file()]
    except FileNotFoundError:  # renamed while it was read
        return []


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(name, marks=pytest.mark.nightly(minutes=1) if name in KILLED_IN_SWEEP else ())
        for name in WITH_SHARED
    ],
    indirect=True,
)
def test_killed_in_every_part_of_a_save(job: Job, expected_losses: dict[int, float]) -> None:
    """While writing, between writing and commit, and twice within the commit: always the newest whole checkpoint.

    What commits is no engine's: it is killed with one that commits at once, one behind training, one from memory.
    """
    kill_while_writing(job, 2)
    between = {"KILL_STEP": "3", "KILL_RANK": "1", "KILL_ENGINE": job.engine.split()[0]}
    run = job.start(script=str(SCRIPTS / "killed_when_written.py"), env=between, launcher=True)
    assert run.exit_codes[1] == -9, (run.exit_codes, run.output[-4000:])
    assert not (job.save / "global_step3").exists()
    commits = (("manifest", 4), ("renamed", 5)) if job.engine in ("torch", "lazy", "memory") else ()
    for point, step in commits:
        environment = {"CRASH_AFTER": point, "CRASH_STEP": str(step)}
        run = job.start(script=str(SCRIPTS / "crash_in_commit.py"), env=environment, launcher=True)
        assert run.exit_codes[0] == -9, (point, run.exit_codes, run.output[-4000:])
    job.finish(7 if commits else 4)
    assert job.resumed == ([1, 2, 3, 5] if commits else [1, 2])
    job.check_losses(expected_losses)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(name, marks=pytest.mark.nightly(minutes=1) if name in NIGHTLY and name != "memory" else ())
        for name in ENGINES
        if engine_class(name).asynchronous
    ],
    indirect=True,
)
def test_saves_that_take_longer_than_the_steps_between(job: Job, expected_losses: dict[int, float]) -> None:
    """Each save waits for the one before, or the step before it does; training on meanwhile shows in neither."""
    slow = {"SLOW_ENGINE": job.engine}
    run = job.start("--exit-interval", "4", script=str(SCRIPTS / "slow_saves.py"), env=slow)
    assert run.ok, run.output[-6000:]
    in_memory = engine_class(job.engine).keeps_in_memory
    phase, steps = ("barrier", (1, 2, 3)) if in_memory else ("wait_previous", (2, 3, 4))
    for rank in range(TWO.world_size):
        spans = [r for r in records(job.save / "restart_trace", 0, rank) if r["type"] == "span"]
        waited = {span.get("tag") for span in spans if span["phase"] == phase and span["blocking"]}
        assert {f"global_step{step}" for step in steps} <= waited
    for step in (2, 4):  # one that the next save waited for, and the last
        resumed = job.start("--load-tag", f"global_step{step}", "--exit-interval", str(step + 1))
        assert resumed.ok, resumed.output[-6000:]  # it compared the hash of every tensor
    assert job.resumed == [2, 4]
    job.check_losses(expected_losses)


def test_every_engine_goes_on_from_a_checkpoint_of_another(
    launcher: Launcher, expected_losses: dict[int, float]
) -> None:
    """Whatever --checkpoint-engine says for saving, the engine that wrote a checkpoint reads it."""
    job = Job(launcher, ENGINES[0], launcher.directory / "run")
    wrote: list[str] = []
    for step, engine in enumerate((*ENGINES, ENGINES[0]), start=1):
        began = time.monotonic()
        job.finish(step, engine, forked_writers=False)
        manifest = Manifest.from_json((job.save / f"global_step{step}" / "manifest.json").read_text())
        wrote.append(manifest.engine)
        print(f"{engine}: step {step} in {time.monotonic() - began:.1f} s")
    assert wrote == [*ENGINES, ENGINES[0]]
    assert job.resumed == list(range(1, len(ENGINES) + 1))
    job.check_losses(expected_losses)
