"""The program of --nodes-command: its commands, and the error if it fails. Real programs, no nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tools.restart_drill.launch import DrillError, cleaned_up
from tools.restart_drill.nodes import LaunchOnNodes, nodes_of

# Notes every line; knows no node named "nobody".
PROGRAM = """
while read -r action node rest; do
    echo "$action $node $rest" >> "$0.log"
    case "$action $node" in
    *nobody) echo "error: no such node" ;;
    *dies) exit 3 ;;
    run*) printf "python train.py --save /a\\nsshd\\nok\\n" ;;
    *) echo ok ;;
    esac
done
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.sh"
    path.write_text(PROGRAM)
    return path


def commands(program: Path) -> list[str]:
    return [line.strip() for line in Path(f"{program}.log").read_text().splitlines()]


def test_what_was_harmed_is_mended(program: Path) -> None:
    with nodes_of(["bash", str(program)], [-1]) as nodes:
        nodes.inject("node-loss", "a", 1, 0)
        nodes.inject("link-cut", "b", 1, 0)
        nodes.inject("rank-stopped", "c", 42, 1)
        nodes.inject("disk-slow", "d", 1, 1)
        nodes.repair(before=1)  # not what is lost, and not what got its fault in cycle 1
        assert commands(program) == ["lose a", "cut b", "run c kill -STOP 42", "slow-disk d", "repair b"]
        assert nodes.processes("c", "/a") == ["python train.py --save /a"] and nodes.processes("c", "/b") == []
    assert commands(program)[-2:] == ["repair a", "repair d"]


def test_which_nodes_nobody_reaches(program: Path) -> None:
    with nodes_of(["bash", str(program)], [-1]) as nodes:
        for number, fault in enumerate(("node-loss", "link-cut", "link-slow", "rank-stopped")):
            nodes.inject(fault, f"n{number}", 1, 0)
        assert nodes.unreachable == {"n0", "n1"}
        nodes.repair(before=1)
        assert nodes.unreachable == {"n0"}


def test_a_program_that_fails_is_named(program: Path) -> None:
    with nodes_of(["bash", str(program)], [-1]) as nodes:
        with pytest.raises(DrillError, match="program.sh: run nobody ps -eo args=: error: no such node"):
            nodes.processes("nobody", "")
        with pytest.raises(DrillError, match="program.sh: run dies kill -KILL 1: the program has ended"):
            nodes.inject("sigkill-one", "dies", 1, 0)
    with pytest.raises(DrillError, match="--nodes-command /no/such: cannot be started"), nodes_of(["/no/such"], [-1]):
        pass


def test_a_message_is_heard_after_what_another_program_has_not_ended_a_line_of(program: Path, tmp_path: Path) -> None:
    """All that a launch runs prints to one pipe."""
    said = "25 %|##  [launch] node 4 (far) has joined as a spare"
    with nodes_of(["bash", str(program)], [-1]) as nodes:
        command = ["bash", "-c", f"echo '{said}'; exec sleep 600"]
        with cleaned_up(LaunchOnNodes(command, tmp_path / "log", False, nodes, tmp_path)) as launch:
            launch.await_spare(300.0)


def test_the_coordinator_is_found_beside_what_has_just_ended(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        ended = psutil.Process(process.pid)
        process.kill()
    waits = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()", "coordinate"]
    with (
        nodes_of(["bash", str(program)], [-1]) as nodes,
        subprocess.Popen(waits, stdout=subprocess.PIPE) as coordinator,
    ):
        assert coordinator.stdout is not None and coordinator.stdout.readline()
        launch = LaunchOnNodes([], tmp_path / "log", False, nodes, tmp_path)
        found = [ended, psutil.Process(coordinator.pid)]
        monkeypatch.setattr(launch, "everything", lambda: found)
        assert launch.coordinator() == found[1:]
        coordinator.kill()
