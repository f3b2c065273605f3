"""The commands of a launch over hosts: signals end all of them and lose none, and what nohup ignores stays ignored."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.unit.script_helpers import TINY, run_script
from tools.common.stopping import stop_on_signals
from tools.restart_bench.launchers.launch import Launch
from tools.restart_bench.launchers.processes import processes

HERE = cast(Launch, SimpleNamespace(run=SimpleNamespace(environ=os.environ)))  # of a launch, its environment alone
STOPS = 6
IGNORING = (
    "bash",
    "-c",
    'trap "" INT HUP; exec bash "$@"',
    "bash",
)  # as nohup, and as a script does for commands with &
# In place of the interpreter: the command of node 0 sends what a lost terminal and Ctrl-C send, and ends well.
SENDS_SIGNALS = """#!/usr/bin/env bash
[[ $* != *check_run* && $* != *check_hosts* ]] || exit 0
[[ " $* " == *"rank 1 "* ]] || kill -HUP $PPID
[[ " $* " == *"rank 1 "* ]] || kill -INT $PPID
"""
# In place of the interpreter, which runs the coordinator: it notes whether all connections are there when it ends.
COORDINATOR = """#!/usr/bin/env bash
[[ $* != *check_run* && $* != *check_hosts* ]] || exit 0
trap 'sleep 0.5; [[ -e $NOTES/lost ]] || touch "$NOTES/coordinator_ended_first"; exit 0' TERM
while (($#)); do
    [[ $1 != --port-file ]] || echo 1234 >"$2"
    shift
done
sleep 600 &
wait
"""
# In place of ssh. When both connections are there, the launch gets SIGTERM.
CONNECTION = """#!/usr/bin/env bash
[[ $* == *pretrain_gpt.py*--coordinator* || $* == *--coordinator*pretrain_gpt.py* ]] || exit 0
trap 'touch "$NOTES/lost"; exit 0' TERM
mkdir "$NOTES/first" 2>/dev/null || kill -TERM $PPID
sleep 600 &
wait
"""


def program(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def settings(tmp_path: Path, launcher: str, python: str, hosts: str) -> dict[str, str]:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{host} slots=4\n" for host in hosts.split()))
    return {
        "LAUNCHER": launcher, "HOSTFILE": str(hostfile), "DEVICE": "cpu", "SKIP_SETUP": "1", "PYTHON": python,
        "DATA_PATH": "/given", "KILL_AT": "none", "WORK_DIR": str(tmp_path / "work"), "NOTES": str(tmp_path),
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
    }  # fmt: skip


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_launch_under_nohup_ignores_what_nohup_does(launcher: str, tmp_path: Path) -> None:
    given = settings(tmp_path, launcher, program(tmp_path / "python", SENDS_SIGNALS), "localhost 127.0.0.1")
    done = run_script(TINY, tmp_path, wrapper=IGNORING, **given)
    assert done.returncode == 0, done.stderr
    done = run_script(TINY, tmp_path, **given)
    assert done.returncode in (-signal.SIGHUP, -signal.SIGINT)  # which otherwise end it


def test_a_drill_and_a_sweep_under_nohup_do_so_too() -> None:
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop_on_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@pytest.mark.slow
def test_a_stop_while_commands_are_started_leaves_none_behind() -> None:
    """At moments at random; a command that is left holds the pipe open."""
    for stop in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) * STOPS:
        reading, writing = os.pipe()
        launch = os.fork()
        if launch == 0:
            start_many(writing)
        os.close(writing)
        time.sleep(random.uniform(0.003, 0.06))
        os.kill(launch, stop)
        assert os.waitstatus_to_exitcode(os.waitpid(launch, 0)[1]) == -stop
        os.set_blocking(reading, False)
        assert os.read(reading, 1) == b""  # all ends of the pipe are closed; otherwise BlockingIOError
        os.close(reading)


def start_many(pipe: int) -> None:
    """Ends this process."""
    try:
        with processes() as mine:
            for _ in range(30):
                mine.start(["sleep", "60"], HERE, stdin=pipe)
            mine.wait_for_one()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(70)


def test_commands_do_not_get_the_signals_of_the_terminal(tmp_path: Path) -> None:
    """This process ends them instead; the others have their effect there."""
    status = tmp_path / "status"
    with processes() as mine:
        mine.start(["cp", "/proc/self/status", str(status)], HERE)
        mine.wait_for_one()
    masks = dict(line.split(":\t") for line in status.read_text().splitlines() if line.startswith("Sig"))
    ignored = {signum for signum in signal.Signals if int(masks["SigIgn"], 16) >> (signum - 1) & 1}
    assert {signal.SIGINT, signal.SIGQUIT, signal.SIGHUP} <= ignored and signal.SIGTERM not in ignored
    assert int(masks["SigBlk"], 16) == 0


def test_waiting_has_a_limit() -> None:
    with processes() as mine:
        sleeping = mine.start(["sleep", "600"], HERE)
        assert mine.wait_for_one(0.01) is None
        ended = mine.start(["false"], HERE)
        assert mine.wait_for_one() == (ended, 1)
    assert sleeping.returncode == -signal.SIGTERM
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_the_coordinator_is_ended_before_the_connections_to_its_nodes(tmp_path: Path) -> None:
    """Without its terminal a node's launcher gets SIGHUP, while its ranks save at the coordinator's word."""
    program(tmp_path / "bin" / "ssh", CONNECTION)
    given = settings(tmp_path, "fork", program(tmp_path / "python", COORDINATOR), "nodeA nodeB")
    done = run_script(TINY, tmp_path, MAX_RESTARTS="1", **given)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert (tmp_path / "coordinator_ended_first").exists() and (tmp_path / "lost").exists()
