"""A directory of checkpoints that two launches want: nothing that was committed is lost, and each is told the truth."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron.checkpointing.store.search import discover
from megatron.net.free_port import free_port
from tests.dist.harness import HANGS_S, LLAMA_STYLE, ROOT, end_all, losses, processes_with, records, wait_for
from tests.dist.tiny_runs import NO_DROPOUT

TRAINING = [
    *LLAMA_STYLE, *NO_DROPOUT, "--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "64",
    "--num-attention-heads", "2", "--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "2",
    "--train-iters", "100000", "--lr", "1e-3", "--log-interval", "1", "--save-interval", "1",
]  # fmt: skip
PROGRAM = str(ROOT / "pretrain_gpt.py")
ALONE = [sys.executable, PROGRAM]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM]
FORK = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", PROGRAM]
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port"]
MARK = "SAVE_DIRECTORY_TEST"


@dataclass
class Job:
    """One launch of a training into `save`."""

    process: subprocess.Popen[bytes]
    log: Path
    mark: str

    def processes(self) -> list[psutil.Process]:
        """All that live of the launch."""
        return processes_with(MARK, self.mark)

    def errors(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith("error:")]


@contextlib.contextmanager
def job(save: Path, dataset: Sequence[str], command: Sequence[str], *flags: str) -> Iterator[Job]:
    log = save.with_name(f"log_{time.monotonic_ns()}")
    mark = log.name + str(save)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = kept | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", MARK: mark}
    argv = [*command, *dataset, *TRAINING, "--save", str(save), "--load", str(save), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    started = Job(process, log, mark)
    try:
        yield started
    finally:
        end_all(started.processes)
        process.wait()


def committed(save: Path) -> set[str]:
    """Tags of the saves that rank 0 was told of as committed, in all launches."""
    trace = save / "restart_trace"
    found = records(trace, rank=0) if trace.is_dir() else []
    ends = [r for r in found if r["type"] == "operation_end" and r["operation"] == "save"]
    return {r["tag"] for r in ends if not r.get("error")}


def assert_nothing_is_lost(save: Path) -> None:
    candidates, problems = discover(save, None)
    assert problems == []
    assert committed(save) <= {found.tag for found in candidates}
    assert (save / "latest").read_text() == candidates[0].tag


def more_commits(save: Path, than: int) -> None:
    wait_for(lambda: len(committed(save)) > than, "a commit")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.nightly(minutes=1)), "deepspeed"])
def test_ranks_end_with_their_launcher(tmp_path: Path, dataset: list[str], launcher: str) -> None:
    """SIGKILL of the launcher alone: nobody trains on, and the next launch finds all that was committed."""
    save = tmp_path / "save"
    command = TORCHRUN if launcher == "torchrun" else [*DEEPSPEED, str(free_port()), PROGRAM]
    with job(save, dataset, command) as first:
        more_commits(save, 1)
        first.process.send_signal(signal.SIGKILL)
        wait_for(lambda: first.processes() == [], "the end of all ranks")
    assert_nothing_is_lost(save)
    before = committed(save)
    with job(save, dataset, FORK, "--exit-interval", "5") as second:
        assert second.process.wait(HANGS_S) == 0, second.log.read_text()[-3000:]
    assert_nothing_is_lost(save)
    assert before < committed(save)
    one, other = (losses(save / "restart_trace", cycle) for cycle in (0, 1))
    assert other and all(one[step] == other[step] for step in set(one) & set(other))


@pytest.mark.slow
def test_a_second_launch_is_refused_or_takes_over(tmp_path: Path, dataset: list[str]) -> None:
    """With saves that training waits for; with those beside training, of engine lazy: test_soak.py."""
    save, engine = tmp_path / "save", ("--checkpoint-engine", "torch")
    with job(save, dataset, ALONE, *engine) as first:
        more_commits(save, 1)
        with job(save, dataset, ALONE, *engine) as refused:
            assert refused.process.wait(HANGS_S) == 2
        (error,) = refused.errors()
        assert re.search(rf"--save {save}: launch \w+ \(generation 1, .*pid {first.process.pid}, .*--take-over", error)
        more_commits(save, len(committed(save)))  # the first one is not disturbed

        with job(save, dataset, ALONE, *engine, "--take-over", "--exit-interval", "50") as second:
            assert first.process.wait(HANGS_S) == 2
            (error,) = first.errors()
            assert re.search(rf"launch \w+ \(generation 2, .*pid {second.process.pid}, .*has superseded", error)
            told = first.log.read_text()
            assert "Traceback" not in told and told.count("has superseded this one") == 1
            assert second.process.wait(HANGS_S) == 0, second.log.read_text()[-3000:]
    assert_nothing_is_lost(save)
    assert json.loads((save / ".generations" / "00000002").read_text())["pid"] == second.process.pid
    assert [path.name for path in save.glob(".incomplete_*")] == []


@pytest.mark.slow
def test_two_keepers(tmp_path: Path, dataset: list[str]) -> None:
    """Two launches of two ranks each that remove old checkpoints of one directory: both keep the newest."""
    save = tmp_path / "save"
    keep = ("--keep-last", "2")
    with job(save, dataset, FORK, *keep) as first:
        more_commits(save, 3)
        with job(save, dataset, FORK, *keep, "--take-over", "--exit-interval", "40") as second:
            assert first.process.wait(HANGS_S) != 0
            assert second.process.wait(HANGS_S) == 0, second.log.read_text()[-3000:]
    candidates, problems = discover(save, None)
    assert problems == [] and "passed over" not in second.log.read_text()
    steps = sorted(int(tag.removeprefix("global_step")) for tag in committed(save))
    assert [found.step for found in candidates] == steps[:-3:-1]
    assert [path.name for path in save.glob(".incomplete_*")] == []


def test_a_launch_that_is_superseded_after_its_last_save_says_so(tmp_path: Path, dataset: list[str]) -> None:
    """Its checkpoint is there, and the later launch may not have seen it."""
    script = Path(__file__).with_name("scripts") / "superseded_at_the_end.py"
    with job(tmp_path / "save", dataset, [sys.executable, str(script)], "--exit-interval", "2") as launch:
        assert launch.process.wait(HANGS_S) == 2
        (error,) = launch.errors()
        assert "has superseded this one" in error
    assert_nothing_is_lost(tmp_path / "save")
