"""What one rank of a host finds out for all of them: real processes, one of which may end too early."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # processes are started

ROOT = Path(__file__).resolve().parents[4]
RANKS = 4
# Each process is a rank; `work` leaves a line in the file. HARM: what becomes of the first rank within it.
RANK = """
import os, signal, sys, time
from megatron.config import ConfigError
from megatron.startup.once_per_host import once_per_host
def work():
    with open(sys.argv[1], "a") as file:
        file.write(os.environ["LOCAL_RANK"] + "\\n")
    harm = os.environ["HARM"] if os.environ["LOCAL_RANK"] == "0" else ""
    if harm == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if harm == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if harm == "error":
        raise ConfigError("--data-path x: is not there")
    return 7, "found"
try:
    print(once_per_host(work, os.environ, float(os.environ["TIMEOUT_S"])))
except (ConfigError, TimeoutError) as error:
    print(type(error).__name__, error)
sys.stdin.read()  # a rank that has found out lives on
"""


def start(directory: Path, harm: str = "", first: int = 0, timeout_s: float = 300.0) -> tuple[list[str], list[str]]:
    """What ranks `first` and above say, and who did the work. Rank 0 is at work when the others start."""
    done = directory / "done"
    environment = os.environ | {
        "LOCAL_WORLD_SIZE": str(RANKS), "WORLD_SIZE": str(RANKS), "HARM": harm, "TIMEOUT_S": str(timeout_s),
        "PYTHONPATH": str(ROOT), "RESTART_TRACE_LAUNCH_ID": f"{directory}", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    started = []
    for rank in range(first, RANKS):
        command, of_rank = [sys.executable, "-c", RANK, str(done)], environment | {"LOCAL_RANK": str(rank)}
        started.append(subprocess.Popen(command, env=of_rank, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        while rank == 0 and not done.exists():
            time.sleep(0.01)
    others = started[1:] if harm == "stop" else started
    said = [process.stdout.readline().strip() for process in others if process.stdout]
    for process in others:
        process.communicate()
    for process in started[: len(started) - len(others)]:
        process.kill()
        process.communicate()
    return said, sorted(done.read_text().split())


def test_one_rank_finds_out_for_all(tmp_path: Path) -> None:
    assert start(tmp_path) == (["(7, 'found')"] * RANKS, ["0"])


def test_all_hear_of_an_error_or_see_it_themselves(tmp_path: Path) -> None:
    """The first rank may be gone with its error before another asks."""
    said, did = start(tmp_path, "error")
    assert said == ["ConfigError --data-path x: is not there"] + said[1:] and did[0] == "0"
    assert all(word in ("ConfigError --data-path x: is not there", "(7, 'found')") for word in said[1:]), said


@pytest.mark.parametrize("harm", ["kill", ""], ids=["killed", "never there"])
def test_without_the_first_rank_each_finds_out_itself(tmp_path: Path, harm: str) -> None:
    said, did = start(tmp_path, harm, first=0 if harm else 1)
    assert said == [""] * bool(harm) + ["(7, 'found')"] * (RANKS - 1)
    assert did == ["0"] * bool(harm) + ["1", "2", "3"]


def test_a_first_rank_that_is_stopped_is_told_of(tmp_path: Path) -> None:
    said, did = start(tmp_path, "stop", timeout_s=0.5)
    assert did == ["0"]
    assert all(word.startswith("TimeoutError the first rank of ") and "not answered for 0.5 s" in word for word in said)
