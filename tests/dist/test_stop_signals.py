"""A job that is asked to end saves first, though the request reaches every process that it has."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron.checkpointing.store.search import discover
from megatron.net.free_port import free_port
from megatron.processes.standby import WAITS
from tests.dist.harness import HANGS_S, records, wait_for
from tests.dist.test_save_directory import ALONE, DEEPSPEED, FORK, PROGRAM, TORCHRUN, Job, job, more_commits
from tests.dist.tiny_runs import load_file

ON_A_NODE = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "1"]


def without_workers_of_its_own(dataset: list[str]) -> list[str]:
    """The fixture's flags with the default of --num-workers."""
    at = dataset.index("--num-workers")
    return [*dataset[:at], *dataset[at + 2 :]]


def to_the_launcher(started: Job) -> None:
    started.process.send_signal(signal.SIGTERM)


def to_all(started: Job, signum: signal.Signals = signal.SIGTERM) -> None:
    """As Slurm, whose signals go to every process of a job step."""
    for process in started.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


@pytest.mark.parametrize(
    ("command", "ask", "exit_code"),
    [
        (FORK, to_the_launcher, 0),
        # With signals for all processes the suite has the test of exit signals below.
        pytest.param(FORK, to_all, 0, marks=pytest.mark.nightly(minutes=1)),
        # So has tests/cluster/test_launchers.py, of ranks of srun.
        pytest.param(ALONE, to_all, 0, marks=pytest.mark.nightly(minutes=1)),
        (TORCHRUN, to_the_launcher, None),
        # Of DeepSpeed's launcher the suite has test_ranks_end_with_their_launcher.
        pytest.param(DEEPSPEED, to_all, None, marks=[pytest.mark.slow, pytest.mark.nightly(minutes=1)]),
    ],
    ids=["megatron.launch", "all of megatron.launch", "all", "torchrun", "all of deepspeed"],
)
def test_data_workers_do_not_end_before_the_rank_has_saved(
    tmp_path: Path, dataset: list[str], command: list[str], ask: Callable[[Job], None], exit_code: int | None
) -> None:
    """With the default number of workers. No process is left afterwards."""
    save = tmp_path / "save"
    command = [*DEEPSPEED, str(free_port()), PROGRAM] if command is DEEPSPEED else command
    with job(save, without_workers_of_its_own(dataset), command, "--exit-signal-handler") as started:
        more_commits(save, 0)
        ask(started)
        code = started.process.wait(HANGS_S)
        wait_for(lambda: started.processes() == [], "the end of all processes")
        told = started.log.read_text()
    stopped = re.search(r"stopping after iteration (\d+): SIGTERM was received", told)
    assert stopped is not None, told[-4000:]
    assert exit_code is None or code == exit_code, told[-4000:]
    assert "Traceback" not in told.split("torch/distributed/elastic")[0], told[-4000:]
    assert discover(save, None)[0][0].step == int(stopped[1])


@pytest.mark.parametrize(
    "options",
    [pytest.param([], marks=pytest.mark.nightly(minutes=1)), ["--max-restarts", "1", "--standby"]],
    ids=["", "standby"],
)
def test_the_launcher_waits_for_the_save_that_an_exit_signal_asks_for(
    tmp_path: Path, dataset: list[str], options: list[str]
) -> None:
    """The signal ends standby ranks, which have nothing to save."""
    save = tmp_path / "save"
    fork = [*FORK[:-1], *options, FORK[-1]]
    with job(save, dataset, fork, "--exit-signal-handler", "--exit-signal", "SIGUSR1") as started:
        more_commits(save, 0)
        if options:
            wait_for(lambda: [one.name() for one in started.processes()].count(WAITS) == 2, "the standby ranks")
        to_all(started, signal.SIGUSR1)
        code = started.process.wait(HANGS_S)
        wait_for(lambda: started.processes() == [], "the end of all processes")
        told = started.log.read_text()
    assert code == 0 and "SIGUSR1 was received and passed on to the ranks" in told, told[-4000:]
    stopped = re.search(r"stopping after iteration (\d+): SIGUSR1 was received", told)
    assert stopped is not None and discover(save, None)[0][0].step == int(stopped[1]), told[-4000:]


def test_a_stop_during_the_start_ends_it_at_once(tmp_path: Path, dataset: list[str]) -> None:
    """There is nothing new to save. The other node never comes, so that this start does not end by itself."""
    save, node = tmp_path / "save", ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    with job(save, dataset, [*ON_A_NODE, *node, PROGRAM], "--exit-signal-handler") as started:
        trace = save / "restart_trace"
        wait_for(lambda: trace.is_dir() and any(r.get("phase") == "imports" for r in records(trace)), "the imports")
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(HANGS_S) == 128 + signal.SIGTERM
        wait_for(lambda: started.processes() == [], "the end of all processes")
        told = started.log.read_text()
    assert "SIGTERM was received and passed on to the ranks" in told
    assert "Traceback" not in told and "killed after" not in told, told[-4000:]
    assert discover(save, None) == ([], [])


def test_a_stop_that_takes_longer_than_the_launcher_waits_is_told_of(tmp_path: Path, dataset: list[str]) -> None:
    """While it trains, and when it has happened."""
    save = tmp_path / "save"
    fork = [*FORK[:-1], "--shutdown-timeout", "0", FORK[-1]]
    with job(save, dataset, fork, "--exit-signal-handler") as started:
        wait_for(lambda: "a stop takes" in started.log.read_text(), "the warning")
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(HANGS_S) == 128 + signal.SIGTERM
        told = started.log.read_text()
    assert told.count("the ranks are killed 0 s after the signal (MEGATRON_SHUTDOWN_TIMEOUT") == 1
    assert "killed after --shutdown-timeout 0, since they had not ended after SIGTERM: ranks 0, 1" in told


def test_data_workers_do_not_outlive_their_rank(tmp_path: Path, dataset: list[str]) -> None:
    save = tmp_path / "save"
    with job(save, without_workers_of_its_own(dataset), ALONE) as started:
        more_commits(save, 0)
        assert len(started.processes()) == 3, "the rank, and two workers"
        started.process.kill()
        wait_for(lambda: started.processes() == [], "the end of all processes")


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.nightly(minutes=1))])
def test_an_evaluation_ends_early(tmp_path: Path, dataset: list[str], name: str) -> None:
    """Nobody waits for it: the launcher would kill the ranks before they save. A resume evaluates on what is next."""
    save, batches = tmp_path / "save", 20_000
    flags = [
        "--exit-signal-handler", "--exit-signal", name, "--split", "80,20,0", "--train-iters", "3", "--lr-warmup-iters",
        "0", "--eval-interval", "2", "--eval-iters", str(batches),
    ]  # fmt: skip
    with job(save, dataset, ALONE, *flags) as started:
        trace = save / "restart_trace"
        wait_for(lambda: trace.is_dir() and any(r.get("step") == 2 for r in records(trace)), "iteration 2")
        started.process.send_signal(signal.Signals[name])
        assert started.process.wait(HANGS_S) == 0
        told = started.log.read_text()
    assert re.search(rf"validation after iteration 2 ends after \d+ of {batches} batches: {name} was received", told), (
        told
    )
    assert "stopping after iteration 2" in told and "validation loss" not in told
    common = load_file(save / "global_step2" / "mp_rank_00_model_states.pt")
    assert common["args"].consumed_valid_samples == 2 * batches
