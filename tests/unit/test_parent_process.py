"""Ranks end with their launcher: real processes, really killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 100.0
RANK = """
import os, sys, time
from pathlib import Path
from megatron.parent_process import end_with_launcher
out = Path(sys.argv[1])
while len(sys.argv) > 2 and os.getppid() == int(sys.argv[2]):
    time.sleep(0.01)  # until this launcher is gone
def tell(name):
    (out / "draft").write_text(str(os.getpid()))
    (out / "draft").rename(out / name)
tell("started")
end_with_launcher(os.environ)
tell("pid")
time.sleep(600)
"""
VARIABLES = {"torchrun": {"TORCHELASTIC_RUN_ID": "none"}, "by hand": {}}


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "rank.py").write_text(RANK)
    yield tmp_path
    started = tmp_path / "started"
    if started.exists() and psutil.pid_exists(int(started.read_text())):
        os.kill(int(started.read_text()), signal.SIGKILL)


def environment() -> dict[str, str]:
    of_launchers = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE", "SLURM_PROCID")
    kept = {name: value for name, value in os.environ.items() if name not in of_launchers}
    return kept | {"PYTHONPATH": str(ROOT)}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def launcher_of(out: Path, command: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """A Python process that starts `command` with `variables` and waits for it, as torchrun's agent does."""
    script = f"import os, subprocess; subprocess.run({command!r}, env=os.environ | {variables!r})"
    launcher = subprocess.Popen([sys.executable, "-c", script], env=environment())
    wait_for((out / "pid").exists)
    return launcher


@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; true', "wrapper"]])
def test_a_rank_ends_with_the_agent_of_torchrun(out: Path, wrapper: list[str]) -> None:
    """Also from within a wrapper, which does not end by itself."""
    rank = [*wrapper, sys.executable, str(out / "rank.py"), str(out)]
    launcher = launcher_of(out, rank, VARIABLES["torchrun"])
    pid = int((out / "pid").read_text())
    assert runs(pid)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_for(lambda: not runs(pid))


def test_a_process_that_was_started_by_hand_outlives_its_parent(out: Path) -> None:
    launcher = launcher_of(out, [sys.executable, str(out / "rank.py"), str(out)], VARIABLES["by hand"])
    pid = int((out / "pid").read_text())
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    wait_for(lambda: psutil.Process(pid).ppid() != launcher.pid)
    assert runs(pid)


@pytest.mark.parametrize(("started_by", "ends"), [("torchrun", True), ("by hand", False)])
def test_a_rank_whose_launcher_was_gone_before_it_looked(out: Path, started_by: str, ends: bool) -> None:
    """Orphans are adopted by a process that is not Python here, as init is not."""
    adopter = textwrap.dedent(
        f"""
        import ctypes, os, sys
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER; holds across exec
        if os.fork() == 0:
            launcher = str(os.getpid())
            if os.fork() == 0:
                os.environ.update({VARIABLES[started_by]!r})
                os.execv(sys.executable, [sys.executable, {str(out / "rank.py")!r}, {str(out)!r}, launcher])
            os._exit(0)
        os.execvp("sleep", ["sleep", "600"])
        """
    )
    with subprocess.Popen([sys.executable, "-c", adopter], env=environment()) as process:
        try:
            wait_for((out / "started").exists)
            pid = int((out / "started").read_text())
            wait_for(lambda: (out / "pid").exists() or not runs(pid))
            assert (out / "pid").exists() != ends
        finally:
            process.kill()
