"""Standby ranks: what the launcher does with the ranks of the next start; real processes, real signals."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from megatron.launch.cli import parse_arguments
from megatron.processes.standby import SETS_UP, WAITS
from tests.unit.megatron.launch.test_launch import Start, start, until  # noqa: F401  the fixture

# A rank of the first start asks for standby ranks, and trains until it is killed. A later one tells where it waited.
SCRIPT = """
from megatron.processes import standby
here()
if standby.is_standby():
    standby.wait_for_release()
    note(f"released_{rank}_{restart}", time.monotonic())
launcher = standby.launcher_to_ask()
if launcher is not None:
    os.kill(launcher, standby.ASK_SIGNAL)
if restart == 2:
    sys.exit(0)
time.sleep(LONG)
"""
FLAGS = ("--nproc-per-node", "2", "--max-restarts", "2", "--standby")


def named(job, name: str) -> list[psutil.Process]:
    return [process for process in job.left() if process.name() == name]


@pytest.mark.slow
def test_standby_ranks_wait_take_the_place_of_those_that_fail_and_are_replaced(start: Start) -> None:  # noqa: F811
    job = start(SCRIPT, *FLAGS)
    for restart in (0, 1):
        waiting = {job.pid(rank, restart + 1) for rank in (0, 1)}
        until(lambda waiting=waiting: {process.pid for process in named(job, WAITS)} == waiting, "those that wait")
        assert not (job.directory / f"released_0_{restart + 1}").exists()
        os.kill(job.pid(0, restart), signal.SIGKILL)
        for rank in (0, 1):
            job.note(f"released_{rank}_{restart + 1}")
    assert job.wait() == 0, job.said
    assert "restart 2 of 2" in job.said
    assert not (job.directory / "pid_0_3").exists()  # no restart is left for them


LOADING_SCRIPT = SCRIPT.replace(
    "    standby.wait_for_release()\n",
    """
    loads = 0
    def load():
        global loads
        loads += 1
        note(f"loaded_{rank}_{loads}", "")
    standby.wait_for_release(load)
""",
).replace(
    "if restart == 2:",
    """
    while not os.path.exists("loaded_1_1"):
        time.sleep(0.01)
    os.kill(launcher, standby.ASK_SIGNAL)
if restart == 2:""",
)


@pytest.mark.slow
def test_they_load_once_they_are_set_up_and_each_time_the_launcher_is_asked_again(start: Start) -> None:  # noqa: F811
    job = start(LOADING_SCRIPT, *FLAGS, "--standby-load")
    for rank in (0, 1):
        job.note(f"loaded_{rank}_2")
    until(lambda: len(named(job, WAITS)) == 2, "those that wait")
    os.kill(job.pid(1, 0), signal.SIGKILL)
    for rank in (0, 1):
        job.note(f"released_{rank}_1")
        assert not (job.directory / f"loaded_{rank}_3").exists()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_none_is_left_when_the_launcher_ends(start: Start, signum: int) -> None:  # noqa: F811
    job = start(SCRIPT, *FLAGS)
    until(lambda: len(named(job, WAITS)) == 2, "those that wait")
    job.process.send_signal(signum)
    assert job.wait() == (128 + signum if signum == signal.SIGTERM else -signum)


@pytest.mark.slow
def test_where_one_ends_the_restart_sets_its_ranks_up_itself(start: Start) -> None:  # noqa: F811
    job = start(SCRIPT, *FLAGS)
    waiting = {job.pid(rank, 1) for rank in (0, 1)}
    until(lambda: len(named(job, WAITS)) == 2, "those that wait")
    os.kill(min(waiting), signal.SIGKILL)
    until(lambda: "standby ranks: rank" in job.said, "the message")
    assert "ended by SIGKILL; the next restart sets its ranks up itself" in job.said
    until(lambda: named(job, WAITS) == [], "the end of the other one")
    os.kill(job.pid(1, 0), signal.SIGKILL)
    until(lambda: job.pid(0, 1) not in waiting and job.pid(1, 1) not in waiting, "new ranks")
    assert not (job.directory / "released_0_1").exists()


@pytest.mark.slow
def test_a_failure_while_they_are_set_up_is_waited_out(start: Start) -> None:  # noqa: F811
    job = start(
        SCRIPT.replace(
            "if standby.is", "while restart == 1 and not os.path.exists('go'): time.sleep(0.01)\nif standby.is"
        ),
        *FLAGS,
    )
    until(lambda: len(named(job, SETS_UP)) == 2, "those that are set up")
    setting_up = job.pid(0, 1)
    os.kill(job.pid(0, 0), signal.SIGKILL)
    until(lambda: "restart 1 of 2" in job.said, "the restart")
    (job.directory / "go").touch()
    job.note("released_0_1")
    assert job.pid(0, 1) == setting_up


@pytest.mark.slow
def test_standby_ranks_that_refuse_to_go_on_are_followed_by_a_start_that_sets_itself_up(start: Start) -> None:  # noqa: F811
    job = start(
        SCRIPT.replace("    standby.wait_for_release()\n", "    standby.wait_for_release()\n    sys.exit(2)\n"),
        "--nproc-per-node", "1", "--max-restarts", "3", "--standby",
    )  # fmt: skip
    until(lambda: len(named(job, WAITS)) == 1, "the one that waits")
    os.kill(job.pid(0, 0), signal.SIGKILL)
    assert job.wait() == 0, job.said
    assert "exit code 2" in job.said and (job.directory / "pid_0_2").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--standby-load", "--max-restarts", "1"], "--standby-load: standby ranks load ahead; give --standby, too"),
        (["--standby"], "--standby: standby ranks take the place of ranks that fail; give --max-restarts, too"),
        (["--standby", "--max-restarts", "1", "--master-port", "1234"], "--standby with --master-port 1234: "),
        (["--standby", "--coordinator", "login:29400"], "--standby with --coordinator login:29400: standby ranks are "),
        (["--standby", "--nnodes", "2", "--master-addr", "node0"], "--standby with --nnodes 2: standby ranks are for "),
    ],
)
def test_standby_is_refused_where_it_cannot_be(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments([*flags, __file__])
    assert ended.value.code == 2 and message in capsys.readouterr().err
