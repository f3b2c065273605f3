"""The scoreboard's arithmetic, its contestants and its command line."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.launchers.variants import PLAIN, Setting
from benchmarks.restart_scoreboard import contestants
from benchmarks.restart_scoreboard.cli import parse_arguments, reason, status
from benchmarks.restart_scoreboard.contestants import ALL, CONTESTANTS, NODE, ONE, OURS, TORCHFT
from benchmarks.restart_scoreboard.report import Result, analyse, render, wrong_losses
from benchmarks.restart_scoreboard.training import Fault, Trained
from megatron.net.free_port import free_port
from tests.dist.harness import HANGS_S, end_all, wait_for
from tests.unit.benchmarks.test_launchers import refusal


def trained(*losses: str, seconds: float = 10.0, kinds: tuple[str, ...] = (ONE, ALL)) -> Trained:
    if kinds == (NODE,):
        return Trained([Fault(NODE, seconds, 3, seconds + 2)], list(enumerate(losses, 1)), 0.5)
    faults = [Fault("one", seconds, 3, seconds + 2), Fault("all", 2 * seconds, 3, 2 * seconds + 2)]
    return Trained(faults, list(enumerate(losses, 1)), 0.5)


def test_losses_are_compared_digit_by_digit_with_those_of_the_same_script() -> None:
    assert wrong_losses([trained("8.1", "7.2")], {1: "8.1", 2: "7.2"}) == 0
    assert wrong_losses([trained("8.1", "7.3"), trained("8.1")], {1: "8.1", 2: "7.2"}) == 1
    assert wrong_losses([trained("8.1", "7.2")], {1: "8.1"}) == 1


def test_ratios_are_to_the_plain_script_by_kind_of_fault(tmp_path: Path) -> None:
    results = {
        "plain": Result([trained("8.1"), trained("8.1", seconds=12.0)]),
        "torchft": Result([trained("7.9")]),
        "dlrover": Result(not_run="TypeError: no"),
        "fork-in-place": Result([trained("8.0", seconds=1.1)]),
    }
    setting = Setting(tmp_path, 4, "torch", "fp32", tp=1, pp=1)
    found = analyse(results, {PLAIN: {1: "8.1"}, TORCHFT: {1: "8.0"}}, setting, {"processors": 2})
    plain, torchft, ours = (found["contestants"][name] for name in ("plain", "torchft", "fork-in-place"))
    assert plain["restart_s"]["one"] == {"median": 11.0, "min": 10.0, "max": 12.0}
    assert plain["wasted_s"] == 12 + 22 + 14 + 26 and len(plain["faults"]) == 4
    assert ours["ratio"] == {"one": pytest.approx(0.1), "all": pytest.approx(0.1)}
    assert (plain["wrong_losses"], torchft["wrong_losses"], ours["wrong_losses"]) == (0, 1, None)
    assert (plain["lines"], ours["lines"]) == (0, None) and torchft["lines"] > 50
    lines = {line.split("|")[1].strip(): line for line in render(found).splitlines() if line.startswith("| ")}
    assert "| 11.00 s (10.00 to 12.00) | 1.000 |" in lines["plain"] and "| equal | 0 |" in lines["plain"]
    assert "| 1 of 1 differ |" in lines["torchft"]
    assert "| not compared | another trainer |" in lines["fork-in-place"] and "dlrover" not in lines
    assert "- dlrover did not run: TypeError: no" in render(found)
    assert render(found).startswith("4 ranks, TP1 PP1 DP4, fp32\n")


def test_our_trainer_may_have_more_than_data_parallel_ranks() -> None:
    found = parse_arguments(["--tp", "2", "--pp", "2", "--ranks", "2", "--only", "fork-in-place", "fork-in-process"])
    assert (found.tp, found.pp, found.ranks) == (2, 2, 2)


def test_agents_with_their_ranks_have_a_table_of_their_own(tmp_path: Path) -> None:
    results = {
        "plain": Result([trained("8.1")]),
        "torchrun-spare": Result([trained("8.1", seconds=20.0, kinds=(NODE,))]),
        "fork-spare": Result([trained("8.0", seconds=3.0, kinds=(NODE,))]),
    }
    shown = render(analyse(results, {PLAIN: {1: "8.1"}}, Setting(tmp_path, 4, "torch", "fp32", tp=1, pp=1), {}))
    first, second = (text.splitlines() for text in shown.split("\n\n")[1:3])
    assert [line.split("|")[1].strip() for line in first[2:]] == ["plain"]
    assert second[2:] == [
        "| torchrun-spare | 20.00 s (20.00 to 20.00) | 1.000 | 3 | 22 s in 1 faults | equal | 0 |",
        "| fork-spare | 3.00 s (3.00 to 3.00) | 0.150 | 3 | 5 s in 1 faults | not compared | another trainer |",
    ]


LISTENER = """import socket, sys, time
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True: time.sleep(1000)"""


def test_agents_stand_for_nodes_that_are_lost_and_repaired(tmp_path: Path) -> None:
    """agents.sh, with agents that do nothing: a spare, and one that was killed, begin when their sleep is ended."""
    port = str(free_port())
    listener = [sys.executable, "-c", LISTENER, port]
    agents = ["bash", "-c", 'echo $$ > "pid_$0"; exec tail -f /dev/null', "NUMBER"]
    script = Path(contestants.__file__).with_name("agents.sh")
    launch = subprocess.Popen(["bash", script, "1", "1", port, *listener, "--", *agents], cwd=tmp_path)
    inner = psutil.Process(launch.pid)

    def sleepers() -> list[psutil.Process]:
        return [child for child in inner.children(recursive=True) if child.name() == "sleep"]

    try:
        wait_for(lambda: len(pids(tmp_path)) == 1 and len(sleepers()) == 1, "the node, while its spare waits")
        sleepers()[0].kill()
        wait_for(lambda: len(pids(tmp_path)) == 2, "the spare")
        killed = pids(tmp_path)[0]
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: len(sleepers()) == 1, "the end of the node")
        sleepers()[0].kill()
        wait_for(lambda: pids(tmp_path).get(0, killed) != killed, "the node that is repaired")
        assert launch.poll() is None
        next(child for child in inner.children() if child.cmdline()[1:] == listener[1:]).kill()
        assert launch.wait(HANGS_S) == 128 + signal.SIGKILL
    finally:
        end_all(lambda: [one for one in psutil.process_iter() if tmp_path == Path(cwd_of(one))])
        launch.wait()


def cwd_of(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""


def test_a_contestant_without_its_package_says_how_to_get_it() -> None:
    assert CONTESTANTS["plain"].missing is None and CONTESTANTS["fork"].missing is None
    absent = dataclasses.replace(CONTESTANTS["torchft"], package="no-such-distribution")
    assert absent.missing == "no-such-distribution is not installed (EXTRAS=scoreboard)"


def test_the_exit_status_tells_of_a_contestant_that_did_not_run_to_its_end() -> None:
    assert status([Result([trained("8.1")]), Result([trained("8.1")])]) == 0
    assert status([Result([trained("8.1")]), Result([trained("8.1")], not_run="it ended with status 1")]) == 1


def test_the_reason_is_what_happened_and_the_last_line_of_the_log() -> None:
    told = "dlrover: it ended with status 1: a warning\nTypeError: no\n"
    assert reason(told) == "it ended with status 1: TypeError: no"
    assert reason("plain: 3 ranks were found, 4 were expected") == "3 ranks were found, 4 were expected"


@pytest.mark.parametrize("name", [name for name, each in CONTESTANTS.items() if each.trainer != OURS])
def test_all_train_the_same_on_the_same_data_and_restart_as_often(name: str, tmp_path: Path) -> None:
    setting = Setting(tmp_path, 4, "torch", "fp32", tp=1, pp=1, iterations=77, restarts=6)
    argv = CONTESTANTS[name].command(setting, tmp_path / "save")
    for flag, value in (
        ("--data", str(tmp_path / "data" / "corpus_text_document")), ("--save", str(tmp_path / "save")),
        ("--global-batch", "16"), ("--tensor-parallel", "1"), ("--iterations", "77"), ("--dtype", "fp32"),
    ):  # fmt: skip
        assert argv[argv.index(flag) + 1] == value
    if "--max_restarts" in argv:
        assert argv[argv.index("--max_restarts") + 1] == ("0" if name == "plain" else "6")
        assert argv[argv.index("-m", argv.index("--max_restarts")) + 1] == PLAIN
    elif name == "torchft":
        assert argv[argv.index("bash") + 2 :][:3:2] == ["4", "6"]  # between them is a port
    else:  # it restarts as often as there are reserves, and then is run again
        assert argv[argv.index("bash") + 2 :][:2] == ["4", str(CONTESTANTS[name].reserves)]


def test_ranks_under_the_in_process_wrapper_end_with_the_one_that_has_its_store(tmp_path: Path) -> None:
    """And with no other: nvrx_inprocess.sh, with ranks that do nothing."""
    rank = tmp_path / "python"
    rank.write_text("#!/bin/sh\necho $$ > pid_$RANK\n[ $RANK = 1 ] && exit 9\nexec sleep 1000\n")
    rank.chmod(0o755)
    script = Path(contestants.__file__).with_name("nvrx_inprocess.sh")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    launch = subprocess.Popen(["bash", script, "2", "1", "1001", "1002"], cwd=tmp_path, env=environment)
    try:
        wait_for(lambda: len(pids(tmp_path)) == 3, "its ranks")
        wait_for(lambda: not psutil.pid_exists(pids(tmp_path)[1]) or launch.poll() is not None, "the end of rank 1")
        assert launch.poll() is None
        os.kill(pids(tmp_path)[0], signal.SIGKILL)
        assert launch.wait(HANGS_S) == 128 + signal.SIGKILL
        wait_for(lambda: not psutil.pid_exists(pids(tmp_path)[2]), "the end of rank 2")
    finally:
        launch.kill()
        end_all(lambda: [psutil.Process(pid) for pid in pids(tmp_path).values() if psutil.pid_exists(pid)])


def pids(directory: Path) -> dict[int, int]:
    """By rank, of those that have begun."""
    found = {int(path.name[4:]): path.read_text().strip() for path in directory.glob("pid_*")}
    return {rank: int(text) for rank, text in found.items() if text}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--faults", "0"], "--faults 0: must be at least 1"),
        (["--ranks", "1"], "--ranks 1: must be at least 2"),
        (["--pp", "0"], "--pp 0: must be at least 1"),
        (
            ["--tp", "2", "--only", "torchrun", "plain", "torchft"],
            "--tp 2 --pp 1: plain, torchft only has data-parallel",
        ),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(parse_arguments, argv, capsys)
