"""--distributed-timeout-minutes: it governs every process group, and a rank that waits longer ends and says so."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from megatron.parallel.topology import Layout
from tests.dist.harness import LLAMA_STYLE, Run, Starvation, Zygote, kill_all, wait_for
from tests.dist.tiny_runs import MODEL, NO_DROPOUT, TRAINING, Launcher, saving

SCRIPTS = Path(__file__).with_name("scripts")
RUN = [*MODEL, *LLAMA_STYLE, *TRAINING, *NO_DROPOUT]
NAMED_WITHIN_S = 2.0  # after the deadline
DEADLINES = (0.1, 0.5, 4.0)  # minutes; torch's own is 30, and a test gives up after 5 (HANGS_S)


@pytest.fixture
def launcher(zygote: Zygote, dataset: list[str], tmp_path: Path) -> Launcher:
    return Launcher(zygote, dataset, tmp_path)


@pytest.mark.parametrize(("engine", "backend"), [("lazy", "gloo"), ("dcp-async", "cpu:gloo")], ids=["gloo", "cpu:gloo"])
def test_every_group_waits_as_long_as_the_flag_says(launcher: Launcher, engine: str, backend: str) -> None:
    """DeepSpeed's groups, the trees of agreements, and the store, restarted in place or not."""
    layout = Layout(tp=1, pp=2, dp=2)
    out = launcher.directory / "out"
    out.mkdir()
    launcher.train(
        layout, *RUN, "--train-iters", "2", "--lr-decay-iters", "4", *saving(launcher.directory / "save", 1),
        "--checkpoint-engine", engine, "--distributed-backend", backend, "--distributed-timeout-minutes", "7.5",
        script=str(SCRIPTS / "group_timeouts.py"),
        env={"OUT": str(out), "TORCHELASTIC_RESTART_COUNT": "0" if backend == "gloo" else "1"},
    )  # fmt: skip
    for rank in range(layout.world_size):
        found = json.loads((out / f"rank_{rank}.json").read_text())
        groups = [tuple(ranks) for ranks, _ in found["groups"]]
        everybody = tuple(range(layout.world_size))
        # the default group and DeepSpeed's own of all ranks, and none of ours
        assert groups.count(everybody) == 2
        assert found["trees"] == [450.0, 450.0]  # of the main thread and of the commits
        assert len(set(groups)) >= 3  # of the pipeline and of data parallelism, too
        assert {seconds for _, seconds in found["groups"]} == {450.0}, found["groups"]
        assert found["store"] == 450.0


@pytest.mark.parametrize(
    ("where", "engine", "phase"),
    [
        ("startup communicators", "torch", "the rendezvous of all ranks|startup|connecting"),
        ("load load", "lazy", "a load|load global_step4"),
        # In a step and in a save that blocks the suite stops one in tests/cluster/test_node_loss.py.
        pytest.param("step 3", "torch", "a training step|training step 4", marks=pytest.mark.nightly(minutes=1)),
        pytest.param("save flush", "torch", "a save|save global_step2", marks=pytest.mark.nightly(minutes=1)),
        ("save serialize", "lazy", "a training step|training step 3|save global_step2"),
    ],
)
def test_a_stopped_rank_is_named_by_all_others(launcher: Launcher, where: str, engine: str, phase: str) -> None:
    """One message of each: rank, host and what it waited in; no traceback. All have ended 2 s after the deadline.

    On a machine that is so busy that ranks wait for one another as long as the flag says, the ranks end before the one
    that is to be stopped is; then they get longer. The longest is more than any machine needs.
    """
    layout = Layout(tp=1, pp=2, dp=2)
    run_flags = [*RUN, "--checkpoint-engine", engine, "--lr-decay-iters", "8"]
    if where.startswith("load"):
        first = launcher.directory / "first"
        launcher.train(layout, *run_flags, "--train-iters", "4", *saving(first, 4))
        run_flags += ["--load", first]
    for minutes in DEADLINES:
        save = launcher.directory / f"save_{minutes:g}"
        run, waited_s = stop_a_rank(launcher, layout, where, minutes, *run_flags, *saving(save, 2))
        if waited_s is not None or minutes == DEADLINES[-1]:
            break
    assert waited_s is not None, run.output
    whole_s, busy_s = waited_s
    assert 60 * minutes <= whole_s and whole_s - busy_s < 60 * minutes + NAMED_WITHIN_S, (waited_s, run.output)
    assert run.exit_codes == [1, 1, 1, -signal.SIGKILL], run.output
    for rank in range(3):
        log = run.log(rank)
        errors = re.findall(rf"^error on rank {rank}, .*", log, re.MULTILINE)
        assert len(errors) == 1 and "Traceback" not in log, log
        assert f"--distributed-timeout-minutes {minutes:g}" in errors[0], errors
        # On a machine that is too busy for another rank to answer in time, that one is named beside it.
        missing = rf"ranks? ([0-2], )*3 on {re.escape(os.uname().nodename)} do(es)? not answer"
        assert re.search(phase, errors[0]) and re.search(missing, errors[0]), errors


def stop_a_rank(
    launcher: Launcher, layout: Layout, where: str, minutes: float, *flags: str | Path
) -> tuple[Run, tuple[float, float] | None]:
    """Train until rank 3 stops itself in `where` and the others have ended.

    Returns the run, and the seconds from the stop to the end of the others, with how long processes waited for a
    processor meanwhile; None if a rank ended before the stop.
    """
    waited_s: list[tuple[float, float]] = []

    def wait_for_the_others(pids: list[int]) -> None:
        others = pids[:3]
        try:
            wait_for(lambda: state_of(pids[3]) == "T" or any(map(has_ended, others)), "the stop of rank 3")
            stopped, busy, too_early = time.monotonic(), Starvation(), any(map(has_ended, others))
            wait_for(lambda: all(map(has_ended, others)), "the end of the ranks that wait")
            waited_s.extend([] if too_early else [(time.monotonic() - stopped, busy.seconds)])
        finally:
            kill_all([pids[3]])

    run = launcher.run(
        layout, *flags, "--train-iters", "8", "--distributed-timeout-minutes", f"{minutes:g}",
        script=str(SCRIPTS / "stops_itself.py"), env={"STOPPED_RANK": "3", "STOPPED_IN": where},
        during=wait_for_the_others,
    )  # fmt: skip
    return run, waited_s[0] if waited_s else None


def has_ended(pid: int) -> bool:
    return state_of(pid) in ("", "Z")


def test_a_rank_that_the_others_never_meet(launcher: Launcher) -> None:
    """One of two is never started."""
    run = launcher.run(
        Layout(tp=1, pp=1, dp=1), *RUN, "--train-iters", "4", "--distributed-timeout-minutes", "0.02",
        env={"WORLD_SIZE": "2"},
    )  # fmt: skip
    assert run.exit_codes == [1] and "Traceback" not in run.output
    (error,) = re.findall(r"^error on rank 0, .*", run.output, re.MULTILINE)
    assert "in the rendezvous of all ranks waited longer than --distributed-timeout-minutes 0.02: rank 1 never" in error


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: T if it is stopped, Z if it has ended; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or read
        return ""
