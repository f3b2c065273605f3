"""Which processes of a launch are its ranks, and that no other gets a signal: real processes, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron.startup.injected_faults import HOLD_SIGNAL
from restart_trace.clock import boot_id
from tests.dist.harness import runs
from tools.common.stopping import StoppedBySignal
from tools.restart_drill.faults import inject
from tools.restart_drill.launch import DrillError, Launch, launched, named, recorded_ranks
from tools.restart_drill.supervisors import LauncherInPlace

# A launcher that forks two ranks; each writes the first record of a trace, has a child of its own, and notes each
# HOLD_SIGNAL.
JOB = """
import json, os, signal, subprocess, sys
from pathlib import Path

def rank(number):
    signal.signal(int(sys.argv[2]), lambda *_: open(f"{sys.argv[1]}/held_{number}", "ab", 0).write(b"."))
    child = subprocess.Popen(["sleep", "600"])
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    first = {"type": "process", "rank": number, "world_size": 2, "pid": os.getpid(), "boot_id": boot_id}
    (Path(sys.argv[1]) / f"rank_{number:05d}_cycle_000.jsonl").write_text(json.dumps(first) + chr(10))
    child.wait()
    os._exit(0)

pids = [os.fork() or rank(number) for number in range(2)]
for pid in pids:
    os.waitpid(pid, 0)
"""


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    trace = tmp_path / "trace"
    trace.mkdir()
    command = [sys.executable, "-c", JOB, str(trace), str(int(HOLD_SIGNAL))]
    with launched(command, tmp_path / "log", echo=False) as started:
        started.await_ranks(trace, 0, 300, lambda: started.exit_code is not None)
        until(lambda: len(started.of_ranks()) == 4, "the children of the ranks")
        yield started


def test_a_launch_that_a_signal_interrupts_as_it_starts_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise StoppedBySignal("SIGTERM")

    command = ["sleep", f"60{os.getpid()}"]
    with monkeypatch.context() as patched, pytest.raises(StoppedBySignal):
        patched.setattr(threading.Thread, "start", interrupted)
        with launched(command, tmp_path / "log", echo=False):
            pass
    assert [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == command] == []


def test_ranks_are_those_that_have_recorded(launch: Launch, tmp_path: Path) -> None:
    world_size, ranks = recorded_ranks(tmp_path / "trace", 0)
    assert world_size == 2 and sorted(ranks) == [0, 1]
    pids = {rank: place.pid for rank, place in ranks.items()}
    assert [process.pid for process in launch.ranks()] == [pids[0], pids[1]]
    assert recorded_ranks(tmp_path / "trace", 1) == (0, {})
    assert {process.pid for process in launch.of_ranks()} > set(pids.values())
    assert len(launch.everything()) == 5  # and the launcher


def test_all_ranks_are_killed_with_what_they_have_started(launch: Launch) -> None:
    assert inject("sigkill-all", launch) == 4
    assert launch.wait(300) == 0 and launch.ranks() == []
    launch.wait_until_gone(300)


def test_a_node_is_killed_with_its_launcher(launch: Launch) -> None:
    assert inject("sigkill-node", launch) == 5
    assert launch.wait(300) == -9 and launch.everything() == []


def test_one_rank_is_killed_alone(launch: Launch) -> None:
    first, last = launch.ranks()
    assert inject("sigkill-one", launch) == 1
    until(lambda: launch.ranks() == [first], "the end of the last rank")
    assert not runs(last.pid)


def test_a_process_of_another_launch_is_no_rank(tmp_path: Path) -> None:
    """A number in an old trace may be that of any process by now."""
    write_first(tmp_path, 0, 1, os.getpid(), boot_id())
    with launched(["sleep", "600"], tmp_path / "log", echo=False) as started:
        assert not started.find_ranks(tmp_path, 0) and started.ranks() == []
        with pytest.raises(DrillError, match="no rank that lives has written a trace"):
            inject("sigkill-all", started)
        with pytest.raises(DrillError, match="not all ranks of cycle 0 had written to .*raise --time-limit"):
            started.await_ranks(tmp_path, 0, 0.01, lambda: False)


def test_ranks_of_other_hosts_are_known_and_get_no_signal(tmp_path: Path) -> None:
    with launched(["sleep", "600"], tmp_path / "log", echo=False) as started:
        (mine,) = started.launcher()
        write_first(tmp_path, 0, 2, mine.pid, boot_id())
        assert not started.find_ranks(tmp_path, 0)
        write_first(tmp_path, 1, 2, mine.pid, "of another host")  # whose process has, by chance, the same number
        assert started.find_ranks(tmp_path, 0) and started.ranks() == [mine]


def test_a_job_that_has_failed_is_not_waited_for(tmp_path: Path) -> None:
    with launched(["sleep", "600"], tmp_path / "log", echo=False) as started:
        started.await_ranks(tmp_path, 0, 300, lambda: True)
        assert started.ranks() == []


def test_ranks_that_share_sequences_have_the_places_of_checkpoints(tmp_path: Path) -> None:
    """There they are data-parallel ranks, one after the other."""
    layout = {"tp": 2, "pp": 1, "dp": 2, "cp": 2}
    write_first(tmp_path, 7, 8, 1, "boot", tp=1, pp=0, dp=1, cp=1, layout=layout)
    write_first(tmp_path, 2, 8, 1, "boot", tp=0, pp=0, dp=0, cp=1, layout=layout)
    _, ranks = recorded_ranks(tmp_path, 0)
    assert {rank: location.coordinates for rank, location in ranks.items()} == {7: (1, 0, 3), 2: (0, 0, 1)}


def write_first(directory: Path, rank: int, world_size: int, pid: int, boot: str, **more: object) -> None:
    first = {"type": "process", "rank": rank, "world_size": world_size, "pid": pid, "boot_id": boot, **more}
    (directory / f"rank_{rank:05d}_cycle_000.jsonl").write_text(json.dumps(first) + "\n")


def test_a_torn_first_line_is_no_rank_yet(tmp_path: Path) -> None:
    (tmp_path / "rank_00000_cycle_000.jsonl").write_text('{"type": "process", "ra')
    assert recorded_ranks(tmp_path, 0) == (0, {})


def test_a_rank_that_is_to_be_harmed_while_it_returns_has_not_returned_before(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the drill sees that the launcher has noticed the other rank's end."""
    plan: Any = SimpleNamespace(limit_s=300.0, supervisor="in-process")
    supervisor, steps = LauncherInPlace(plan), list[str]()
    supervisor.launch = launch
    _, last = launch.ranks()
    (launcher,) = launch.launcher()
    held = tmp_path / "trace" / "held_0"

    def stopped(process: psutil.Process) -> bool:
        return process.status() == psutil.STATUS_STOPPED

    def has_failed() -> bool:
        steps.append("waits")
        until(held.exists, "the rank that would return is not held")
        assert held.read_bytes() in (b"", b".")
        return not runs(last.pid)

    monkeypatch.setattr(supervisor, "has_failed", has_failed)
    with supervisor.while_ranks_return(lambda: inject("sigkill-one", launch)) as killed:
        assert killed == 1 and steps
        until(lambda: stopped(launcher) and held.read_bytes() == b"..", "the rank goes on, and its launcher does not")
    until(lambda: not stopped(launcher), "the launcher goes on")


def test_a_process_that_has_ended_since_it_was_found_has_no_name() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        found = [psutil.Process(process.pid), psutil.Process()]
        process.kill()
    assert named(found) == [(found[1], found[1].name())]
