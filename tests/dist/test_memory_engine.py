"""Engine `memory` under megatron.launch: killed ranks go on from slots that the launcher holds, to the same bits."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.store.manifest import Manifest
from megatron.parallel.topology import Layout
from megatron.peers.memory_slots import slots_held_by
from tests.dist.harness import HANGS_S, ROOT, Zygote, end_all, kill_all, losses, records, wait_for
from tests.dist.hold import held_environment
from tests.dist.test_launch import LAUNCHER, environment, marked
from tests.dist.test_restart_drill import TRAINING
from tests.dist.tiny_runs import Launcher
from tests.own_shm import in_own_shm, left_in_shm

HELD_AT = 8  # every iteration is saved, each fifth to storage, too
LAST = 11


def saved_when_held(of_a_rank: list[dict[str, Any]]) -> bool:
    saves = [r for r in of_a_rank if r["type"] == "operation_end" and r["operation"] == "save"]
    return any(r["step"] == HELD_AT and r["outcome"] == "ok" for r in saves)


class Job:
    """Two ranks that are held after iteration HELD_AT, and restarted once."""

    def __init__(self, directory: Path, dataset: list[str], *more: str) -> None:
        self.save = directory / "save"
        self.trace = self.save / "restart_trace"
        self.directory = directory
        flags = [
            *TRAINING, "--save", str(self.save), "--load", str(self.save), "--verify-restored-state",
            "--save-interval", "1", "--checkpoint-engine", "memory", "--persist-interval", "5",
            "--train-iters", str(LAST), *more,
        ]  # fmt: skip
        command = [*LAUNCHER, "--max-restarts", "1", str(ROOT / "pretrain_gpt.py"), *dataset, *flags]
        with (directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                in_own_shm(command, directory / "shm"), cwd=directory, stdout=log, stderr=subprocess.STDOUT,
                env=environment(directory) | held_environment(cycles=1, after=HELD_AT),
            )  # fmt: skip

    @property
    def output(self) -> str:
        return (self.directory / "log").read_text()

    def until_held(self, done: Callable[[list[dict[str, Any]]], bool] = saved_when_held) -> None:
        """Return when the records of both ranks tell that they are `done`: both wait, and the last save is over."""
        wait_for(
            lambda: self.process.poll() is not None or all(self._is(done, rank) for rank in (0, 1)),
            f"iteration {HELD_AT}",
        )
        assert self.process.poll() is None, self.output[-4000:]

    def _is(self, done: Callable[[list[dict[str, Any]]], bool], rank: int) -> bool:
        return self.trace.exists() and done(records(self.trace, 0, rank))

    def pid(self, rank: int) -> int:
        return records(self.trace, 0, rank)[0]["pid"]

    def kill(self) -> None:
        kill_all([self.pid(rank) for rank in (0, 1)])
        assert self.process.wait(HANGS_S) == 0, self.output[-4000:]
        wait_for(lambda: marked(self.directory) == [], "the end of all processes")
        assert left_in_shm(self.directory / "shm") == []

    def loaded(self) -> tuple[int, set[str]]:
        """(step, tiers that were read from) of the load after the restart, over both ranks."""
        found = [r for rank in (0, 1) for r in records(self.trace, 1, rank)]
        steps = {r["step"] for r in found if r["type"] == "operation_end" and r["operation"] == "load"}
        reads = [r for r in found if r["type"] == "span" and r.get("detail") == "read"]
        return steps.pop(), {r["tier"] for r in reads}


def trained_before(launcher: Launcher, save: Path) -> None:
    """Checkpoints of iterations 1 to 3 on storage, by the default engine."""
    saving = ["--save", save, "--save-interval", "1", "--verify-restored-state", "--restart-trace", "off"]
    launcher.train(Layout(tp=1, pp=1, dp=2), *TRAINING, *saving, "--train-iters", str(LAST), "--exit-interval", "3")


def run(directory: Path, dataset: list[str], harm: Callable[[Job], None] = lambda job: None, *more: str) -> Job:
    job = Job(directory, dataset, *more)
    try:
        job.until_held()
        harm(job)
        job.kill()
    finally:
        end_all(lambda: marked(directory))
        job.process.wait(HANGS_S)
    return job


def flip_a_bit_of_each_newest(job: Job) -> None:
    """Of rank 0's slots, in which every save has been: so those of iterations 7 and 8."""
    slots = slots_held_by(job.pid(0))
    for slot in slots[0]:
        position = slot.num_bytes - 100
        (byte,) = os.pread(slot.data, 1, position)
        os.pwrite(slot.data, bytes([byte ^ 0x10]), position)
    for slot in (slot for mine in slots for slot in mine):
        slot.close()


def same_losses(job: Job, first: int) -> None:
    before, after = losses(job.trace, 0, 1), losses(job.trace, 1, 1)
    assert sorted(before) == list(range(1, HELD_AT + 1)) and sorted(after) == list(range(first, LAST + 1))
    assert all(before[step] == after[step] for step in set(before) & set(after))


@pytest.mark.slow
def test_killed_ranks_go_on_from_the_newest_save_in_memory(tmp_path: Path, dataset: list[str]) -> None:
    job = run(tmp_path, dataset, lambda job: None, "--ckpt-fully-parallel-load")
    assert job.loaded() == (HELD_AT, {"local_memory"})
    same_losses(job, HELD_AT + 1)
    assert job.output.count("--ckpt-fully-parallel-load: no effect on a load from host memory") == 1
    assert "which was committed later" not in job.output, "`latest` was set back by nobody"
    stored = sorted(path.name for path in job.save.glob("global_step*"))
    assert stored == [f"global_step{step}" for step in (10, 11, 5)], "each fifth, and the last"
    manifest = Manifest.of(job.save / "global_step10")
    assert manifest.engine == "memory" and sorted(n for n in manifest.files if n.startswith("rank_")) == [
        "rank_00000.safetensors", "rank_00001.safetensors",
    ]  # fmt: skip
    states = [state for file in manifest.files.values() for state in file.states]
    assert len(states) == len(set(states)), "a state is stored twice"


def nothing_is_stored(job: Job) -> None:
    assert list(job.save.glob("global_step*")) == []


@pytest.mark.slow
def test_flags_of_the_first_start_do_not_hide_saves_that_are_in_memory_alone(
    tmp_path: Path, zygote: Zygote, dataset: list[str]
) -> None:
    """Nothing in --save tells of them: the run would begin once more, as --load of another place says."""
    pretrained = tmp_path / "pretrained"
    trained_before(Launcher(zygote, dataset, tmp_path), pretrained)
    begins = ["--load", str(pretrained), "--finetune", "--persist-interval", "100"]
    job = run(tmp_path, dataset, nothing_is_stored, *begins)
    assert job.loaded() == (HELD_AT, {"local_memory"})
    same_losses(job, HELD_AT + 1)
    assert job.output.count("describes the first start and is passed over") == 1


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)
def test_without_saves_in_memory_the_flags_of_the_first_start_are_obeyed(
    tmp_path: Path, zygote: Zygote, dataset: list[str]
) -> None:
    """--load-tag goes back from iteration 3 to 1 in --save; a restart before the first save goes back there, too."""
    trained_before(Launcher(zygote, dataset, tmp_path), tmp_path / "save")
    back = ["--load-tag", "global_step1", "--save-interval", "50", "--persist-interval", "1"]
    job = Job(tmp_path, dataset, *back)
    try:
        job.until_held(lambda of_a_rank: any(r["type"] == "iteration" and r["step"] == 1 + HELD_AT for r in of_a_rank))
        job.kill()
    finally:
        end_all(lambda: marked(tmp_path))
        job.process.wait(HANGS_S)
    before, after = losses(job.trace, 0, 1), losses(job.trace, 1, 1)
    assert sorted(after) == list(range(2, LAST + 1))
    assert all(before[step] == after[step] for step in before)
    assert "in host memory" not in job.output


@pytest.mark.slow
def test_altered_slots_are_named_and_storage_is_used(tmp_path: Path, dataset: list[str]) -> None:
    job = run(tmp_path, dataset, flip_a_bit_of_each_newest)
    step, tiers = job.loaded()
    assert step == 5 and tiers == {"local_memory", "storage"}
    assert job.output.count("checkpoint passed over: rank 0: slot ") == 2, job.output[-4000:]
    same_losses(job, 6)
