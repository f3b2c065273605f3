"""SIGKILL at any instant leaves a loadable checkpoint: real ranks, real kills, a real file system."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.parallel.topology import Layout
from tests.dist.harness import HANGS_S, LLAMA_STYLE, Zygote, kill_all, losses, records, runs
from tests.dist.save_stages import IN_BACKGROUND, SHORT, STAGES, stage_after
from tests.dist.tiny_runs import DROPOUT, Launcher, saving
from tools.restart_drill.injection_points import TraceTail

LAYOUT = Layout(tp=1, pp=2, dp=2)
TWO = Layout(tp=1, pp=1, dp=2)
# Some 10 MB per rank and next to no arithmetic, so that a save takes longer than an iteration.
MODEL = [
    *LLAMA_STYLE, "--num-layers", "4", "--hidden-size", "256", "--ffn-hidden-size", "512", "--seq-length", "16",
    "--num-attention-heads", "4", "--num-key-value-heads", "2", "--bf16",
]  # fmt: skip
TRAINING = [
    *DROPOUT, "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "200", "--lr", "1e-3",
    "--lr-warmup-iters", "4", "--lr-decay-style", "cosine", "--min-lr", "1e-4", "--log-interval", "1",
]  # fmt: skip
TINY = [
    "--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "64", "--num-attention-heads", "2",
    "--seq-length", "16", "--bf16",
]  # fmt: skip
SCRIPTS = Path(__file__).with_name("scripts")
KILLED_WHEN_WRITTEN = str(SCRIPTS / "killed_when_written.py")
HELD_IN_SAVE = str(SCRIPTS / "held_in_save.py")


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


def killed_in(trace: Path, cycle: int, rank: int = 0) -> set[str]:
    """Stages of the saves that a rank was in when it was killed: of each the furthest of its threads."""
    stages: dict[int, str] = {}
    for record in records(trace, cycle, rank):
        if record["type"] == "operation_end":
            stages.pop(record["op"], None)
        elif stage := stage_after(record):
            stages[record["op"]] = max(stage, stages.get(record["op"], stage), key=STAGES.index)
    return set(stages.values())


@dataclass
class Killer:
    """Kills ranks a moment after one of them enters `target` in its `nth` save of this launch.

    `victims` picks the process ids to kill, in order, out of those of all ranks.
    """

    trace: Path
    cycle: int
    target: str
    nth: int
    delay_s: float
    victims: Callable[[list[int]], list[int]]
    rank: int = 0

    def __call__(self, pids: list[int]) -> None:
        tail = TraceTail(self.trace, self.cycle, self.rank)
        where = f"stage {self.target} of save {self.nth} in cycle {self.cycle}"
        deadline = time.monotonic() + HANGS_S
        saves: list[int] = []  # their operations' numbers; one may begin while the one before is still committed
        while True:
            time.sleep(0.0002)  # some stages last a millisecond
            for record in tail.new_records():
                stage = stage_after(record)
                if stage == "begun":
                    saves.append(record["op"])
                if stage == self.target and len(saves) >= self.nth and record["op"] == saves[self.nth - 1]:
                    time.sleep(self.delay_s)
                    kill_all(self.victims(pids))
                    return
            assert time.monotonic() < deadline, f"{where} was not reached"
            assert all(map(runs, pids)), f"a rank ended before {where}"


def finished(trace: Path, operation: str, cycle: int, rank: int = 0) -> list[dict[str, Any]]:
    """Closing records of the operations that succeeded."""
    found = [r for r in records(trace, cycle, rank) if r["type"] == "operation_end" and r["operation"] == operation]
    return [r for r in found if r["outcome"] == "ok"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("engine", "stages"), [("torch", STAGES), ("lazy", IN_BACKGROUND)], ids=["torch", "lazy"])
def test_sigkill_at_random_instants_of_saves(launcher: Launcher, engine: str, stages: tuple[str, ...]) -> None:
    """One job, killed many times: each start loads what was saved last, bit for bit, and goes on as if unharmed.

    Rank 0 waits in the stage that it is to be killed in, so that each stage has its kill however fast the machine is.
    In two launches the kills come when they come. KILLS=200 in the environment: so many, and half of them come so, and
    torch's on four ranks, as each engine's in test_engines_training.py.
    """
    many = "KILLS" in os.environ
    layout = LAYOUT if many and engine == "torch" else TWO
    kills = int(os.environ["KILLS"]) if many else len(stages) + 2
    rng = random.Random(20)
    save, reference = launcher.directory / "killed", launcher.directory / "reference"
    trace = save / "restart_trace"
    flags = [*MODEL, *TRAINING, *saving(save, 1), "--load", str(save), "--keep-last", "2"]
    flags += ["--checkpoint-engine", engine]
    in_turn = itertools.cycle(stages)
    for cycle in range(kills):
        held = cycle % (2 if many else 5) != 0
        target = next(in_turn) if held else rng.choice(stages)
        nth = 2 if held else 1  # those that wait get past one save, so that the job gets on
        # Rank 0 before it sees others go, where it waits.
        order = (lambda pids: pids) if held else (lambda pids: rng.sample(pids, len(pids)))
        delay_s = rng.uniform(0.0, 0.001 if target in SHORT else 0.01)
        killer = Killer(trace, cycle, target, nth, delay_s, order)
        hold = {"HOLD_STAGE": target, "HOLD_SAVE": str(nth)}
        run = launcher.run(layout, *flags, during=killer, **({"script": HELD_IN_SAVE, "env": hold} if held else {}))
        # Between two kills a rank may find another gone, and end by itself.
        assert -9 in run.exit_codes and 0 not in run.exit_codes, run.output[-4000:]
        assert not held or target in killed_in(trace, cycle), f"cycle {cycle}"
    last = launcher.train(layout, *flags, "--exit-interval", "1")
    assert "passed over" not in last.output
    check_what_was_loaded(trace, kills, layout.world_size)
    check_losses(launcher, trace, reference, kills, layout)
    assert sorted(p.name for p in save.iterdir() if p.is_dir()) == sorted(
        ["restart_trace", ".generations", *(f"global_step{step}" for step in newest_steps(save, 2))]
    )


def newest_steps(save: Path, count: int) -> list[int]:
    last = int((save / "latest_checkpointed_iteration.txt").read_text())
    return list(range(last - count + 1, last + 1))


def check_what_was_loaded(trace: Path, kills: int, world_size: int) -> None:
    """Never older than the newest save that was acknowledged, never newer than the newest that was begun."""
    acknowledged = begun = 0
    for cycle in range(kills + 1):
        for rank in range(world_size):
            loaded = [r["step"] for r in finished(trace, "load", cycle, rank) if "step" in r]
            assert loaded or not acknowledged, f"rank {rank} loaded nothing in cycle {cycle}"
            assert all(acknowledged <= step <= begun for step in loaded), (cycle, rank, loaded)
        saves = [r["step"] for r in finished(trace, "save", cycle)]
        acknowledged = max([acknowledged, *saves])
        started = [r for r in records(trace, cycle) if r["type"] == "operation_begin" and r["operation"] == "save"]
        begun = max([begun, *(r["step"] for r in started)])
    assert acknowledged >= kills // 2, "the job hardly got anywhere, so the test shows little"


def check_losses(launcher: Launcher, trace: Path, reference: Path, kills: int, layout: Layout) -> None:
    """Every iteration that any cycle finished has the loss of a run that was never interrupted."""
    cycles = [losses(trace, cycle) for cycle in range(kills + 1)]
    last = max(max(steps) for steps in cycles if steps)
    flags = [*MODEL, *TRAINING, "--restart-trace-dir", str(reference), "--exit-interval", str(last)]
    launcher.train(layout, *flags)
    expected = losses(reference)
    assert sorted(expected) == list(range(1, last + 1))
    for cycle, mine in enumerate(cycles):
        assert mine.items() <= expected.items(), f"cycle {cycle}"


def tags(save: Path) -> list[str]:
    others = ("restart_trace", ".generations")
    return sorted(path.name for path in save.iterdir() if path.is_dir() and path.name not in others)


def loaded_tags(trace: Path, cycle: int, world_size: int) -> list[str | None]:
    """Tag that each rank loaded; None where it loaded nothing."""
    found = [finished(trace, "load", cycle, rank) for rank in range(world_size)]
    return [loads[-1].get("tag") if loads else None for loads in found]


def test_sigkill_of_one_rank(launcher: Launcher) -> None:
    """Without a launcher that would end them, the others end by themselves and commit nothing."""
    save = launcher.directory / "run"
    trace = save / "restart_trace"
    flags = [*MODEL, *TRAINING, *saving(save, 1), "--load", str(save)]
    last = {"KILL_STEP": "2", "KILL_RANK": str(LAYOUT.world_size - 1), "KILL_ENGINE": "torch"}
    run = launcher.run(LAYOUT, *flags, script=KILLED_WHEN_WRITTEN, env=last)
    assert run.exit_codes[-1] == -9
    assert all(code > 0 for code in run.exit_codes[:-1]), run.exit_codes
    assert not (save / "global_step2").exists() and (save / "latest").read_text() == "global_step1"
    launcher.train(LAYOUT, *flags, "--exit-interval", "2")
    assert loaded_tags(trace, 1, LAYOUT.world_size) == ["global_step1"] * LAYOUT.world_size
    assert tags(save) == ["global_step1", "global_step2"]


CRASH = str(SCRIPTS / "crash_in_commit.py")


@dataclass
class Crashes:
    """A job of two ranks that is started again and again."""

    launcher: Launcher
    save: Path
    cycle: int = -1

    @property
    def flags(self) -> list[str]:
        return [*LLAMA_STYLE, *TINY, *TRAINING, *saving(self.save, 1), "--load", str(self.save)]

    @property
    def trace(self) -> Path:
        return self.save / "restart_trace"

    def start(self, *more: str, **options: Any) -> list[str | None]:
        """Start once more; tags that the ranks loaded."""
        self.cycle += 1
        self.run = self.launcher.run(TWO, *self.flags, *more, **options)
        return loaded_tags(self.trace, self.cycle, TWO.world_size)

    def crash(self, point: str, step: int, *more: str, rank: int = 0) -> list[str | None]:
        """Start once more and kill `rank` within the commit of iteration `step`, or in the removal that follows."""
        environment = {"CRASH_AFTER": point, "CRASH_STEP": str(step), "CRASH_RANK": str(rank)}
        loaded = self.start(*more, script=CRASH, env=environment, launcher=True)
        assert self.run.exit_codes[rank] == -9, (point, self.run.exit_codes, self.run.output[-4000:])
        return loaded


@pytest.fixture
def crashes(launcher: Launcher) -> Crashes:
    return Crashes(launcher, launcher.directory / "run")


def test_crash_at_every_step_of_a_commit(crashes: Crashes) -> None:
    """Each start crashes at another point; the next one loads what was whole at that point."""
    both = lambda tag: [tag] * TWO.world_size  # noqa: E731
    save = crashes.save
    crashes.crash("manifest", 2)
    assert tags(save)[-1] == "global_step1" and len(tags(save)) == 2  # the other one is hidden: not committed

    assert crashes.crash("renamed", 2) == both("global_step1")
    assert (save / "latest").read_text() == "global_step1"  # of no consequence: the checkpoint is whole

    assert crashes.crash("latest", 3) == both("global_step2")
    assert (save / "latest_checkpointed_iteration.txt").read_text() != "3"

    # Going back to 1 makes step 2 be saved again; killed with the old one aside and the new one not in place.
    assert crashes.crash("moved_aside", 2, "--load-tag", "global_step1") == both("global_step1")
    assert "global_step2" not in tags(save) and "global_step2.replaced" in tags(save)
    assert crashes.start("--load-tag", "global_step2", "--exit-interval", "3") == both("global_step2")
    assert crashes.run.ok, crashes.run.output[-4000:]

    # Two old ones are to go at step 4, one at steps 5 and 6: killed when one has lost a file, or only its name.
    assert crashes.crash("half_removed", 4, "--keep-last", "2") == both("global_step3")
    assert crashes.crash("unlinked_name", 5, "--keep-last", "1") == both("global_step4")
    assert crashes.crash("half_removed", 6, "--keep-last", "1", rank=1) == both("global_step5")
    assert crashes.start("--keep-last", "2", "--exit-interval", "7") == both("global_step6")
    assert crashes.run.ok, crashes.run.output[-4000:]
    assert tags(save) == ["global_step6", "global_step7"]
    assert "passed over" not in crashes.run.output


def test_losses_after_crashes_are_those_of_a_run_without(crashes: Crashes) -> None:
    crashes.crash("renamed", 2)
    crashes.crash("latest", 3)
    crashes.start("--exit-interval", "4")
    reference = crashes.launcher.directory / "reference"
    flags = ["--restart-trace-dir", str(reference), "--exit-interval", "4"]
    crashes.launcher.train(TWO, *LLAMA_STYLE, *TINY, *TRAINING, *flags)
    expected = losses(reference)
    assert sorted(expected) == [1, 2, 3, 4]
    for cycle, first in enumerate((1, 3, 4)):
        mine = losses(crashes.trace, cycle)
        assert min(mine) == first and mine.items() <= expected.items()


def test_keep_last_over_resumes_counts_whole_checkpoints_only(crashes: Crashes) -> None:
    """Those of earlier launches too, which all ranks look at together; one that lost bytes since is not counted."""
    save, keep = crashes.save, ("--keep-last", "3")
    crashes.start(*keep, "--exit-interval", "4")
    assert tags(save) == ["global_step2", "global_step3", "global_step4"]
    shard = next((save / "global_step3").glob("*pp_rank_1*_optim_states.pt"))
    os.truncate(shard, shard.stat().st_size - 1)
    crashes.start(*keep, "--exit-interval", "5")
    assert crashes.run.ok, crashes.run.output[-4000:]
    assert f"not counted by --keep-last: global_step3: {shard} has " in crashes.run.output
    assert tags(save) == ["global_step2", "global_step3", "global_step4", "global_step5"]
    crashes.start(*keep, "--exit-interval", "7")
    assert crashes.run.ok, crashes.run.output[-4000:]
    assert tags(save) == ["global_step5", "global_step6", "global_step7"]
