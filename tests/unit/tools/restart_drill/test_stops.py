"""The stops that a soak draws, the commands of its launchers, and what its result shows."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import psutil
import pytest

from megatron.launch.cli import parse_arguments as parse_launch
from tools.restart_bench import launcher_entries
from tools.restart_drill import command as commands
from tools.restart_drill.cli import main
from tools.restart_drill.launch import DrillError, Launch, launched
from tools.restart_drill.soak.launchers import LAUNCHERS, LEFT_OUT, split
from tools.restart_drill.soak.stop_results import StopResult, stop_tables
from tools.restart_drill.soak.stop_soak import send
from tools.restart_drill.soak.stops import ENGINES, MOMENTS, NEXT, SIGNALS, TARGETS, WORKERS, Stop, drawn, parse_stop

FORK = [
    "env", "DS_ACCELERATOR=cpu", sys.executable, "-m", "megatron.launch", "--max-restarts", "0",
    "--shutdown-timeout", "40", "--master-port", "29500", "--nproc-per-node", "2",
    "pretrain_gpt.py", "--num-layers", "2",
]  # fmt: skip
ROOT = Path(__file__).resolve().parents[4]
HELPER = "launcher=torchrun,workers=2,engine=lazy,signal=SIGKILL,target=helper,moment=save,next=later"
ASKED = "launcher=deepspeed,workers=4,engine=torch,signal=SIGUSR1,target=all,moment=evaluation,next=later"


# A rank that starts a helper once the file "begin" is there, and ends as it does.
JOB = """
import json, os, subprocess, sys, time
from pathlib import Path
here = Path(sys.argv[1])
boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
first = {"type": "process", "rank": 0, "world_size": 1, "pid": os.getpid(), "boot_id": boot_id}
(here / "rank_00000_cycle_000.jsonl").write_text(json.dumps(first) + chr(10))
while not (here / "begin").exists():
    time.sleep(0.01)
sys.exit(-subprocess.Popen(["sleep", "600"]).wait())
"""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with launched([sys.executable, "-c", JOB, str(tmp_path)], tmp_path / "log", echo=False) as started:
        started.await_ranks(tmp_path, 0, 300, lambda: started.exit_code is not None)
        yield started


def test_a_helper_is_waited_for(launch: Launch, tmp_path: Path) -> None:
    """It is there with the first batch, or the first save; until then the stop would reach nobody."""
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send, parse_stop(HELPER), launch, random.Random(1), 300)
        assert sending.done() is False
        (tmp_path / "begin").touch()
        sending.result(300)
    assert launch.wait(300) == signal.SIGKILL


def test_a_stop_that_reaches_nobody_is_no_stop(launch: Launch, tmp_path: Path) -> None:
    with pytest.raises(DrillError, match="reached nobody: the ranks had no helper process for 0.2 s"):
        send(parse_stop(HELPER), launch, random.Random(1), 0.2)
    launch.send(signal.SIGKILL, launch.launcher())
    assert launch.wait(300) == -signal.SIGKILL
    with pytest.raises(DrillError, match="ended before the stop, with exit code -9"):
        send(parse_stop(HELPER), launch, random.Random(1), 300)


def test_all_kinds_of_stops_come_before_one_comes_again() -> None:
    kinds = [(stop.signal, stop.target, stop.moment, stop.next) for stop in islice(drawn(3), 200)]
    number = len(set(kinds))
    assert len(set(kinds[:number])) == number and set(kinds[number : 2 * number]) == set(kinds)
    assert [set(values) for values in zip(*kinds, strict=True)] == list(map(set, (SIGNALS, TARGETS, MOMENTS, NEXT)))


def test_the_seed_draws_every_launcher_engine_and_number_of_workers() -> None:
    stops = list(islice(drawn(1), 200))
    assert stops == list(islice(drawn(1), 200)) != list(islice(drawn(2), 200))
    assert {stop.launcher for stop in stops} == set(LAUNCHERS)
    assert {stop.workers for stop in stops} == set(WORKERS) and {stop.engine for stop in stops} == set(ENGINES)
    assert all(stop.refusal() is None and parse_stop(str(stop)) == stop for stop in stops)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("workers=3", "workers=3 is none of 0, 2, 4"),
        ("launcher=mpirun", "launcher=mpirun is none of restart-launch, "),
        ("workers=0", "target=helper is a data worker"),
        ("moment=load", "target=helper is a data worker"),
        ("signal=SIGTERM", "target=helper ignores the signals that ask a job to end"),
        ("launcher=by-hand,target=launcher", "launcher=by-hand has no launcher"),
        ("launcher=by-hand,target=rank,moment=start-up", "they wait for its deadline"),
        ("workers=few", "give launcher=...,workers=...,engine=...,signal=...,target=...,moment=...,next=..."),
        ("next=never", "next=never is none of later, at-once, beside, take-over"),
        ("next=at-once,launcher=torchrun-in-place", "needs a launcher that ends with its ranks"),
        ("next=at-once,moment=evaluation", "next=at-once needs a job that saves"),
        ("next=at-once,target=all,signal=SIGTERM", "next=at-once needs signal=SIGKILL"),
        ("next=beside", "next=beside needs signal=SIGTERM,target=all"),
        ("node=1", "give launcher=..."),
    ],
)
def test_what_is_no_stop_is_refused(changed: str, message: str) -> None:
    parts = dict(part.split("=") for part in f"{HELPER},{changed}".split(","))
    with pytest.raises(ValueError, match="^launcher=") as refused:
        parse_stop(",".join(f"{name}={value}" for name, value in parts.items()))
    assert message in str(refused.value)


def test_stops_are_of_every_launcher_of_one_host_and_the_documentation_names_them() -> None:
    stopped = {launcher.of for launcher in LAUNCHERS.values()} - {""}
    assert stopped | LEFT_OUT.keys() == launcher_entries.LAUNCHERS.keys()
    (row,) = re.findall(r"^\| launcher \|(.*)", (ROOT / "docs" / "restart_drill.md").read_text(), re.M)
    assert re.findall(r"`([\w-]+)`", row) == list(LAUNCHERS)


def test_every_launcher_starts_the_same_training() -> None:
    training = split(FORK)
    for name, launcher in LAUNCHERS.items():
        command = launcher.command(training)
        assert command[:2] == FORK[:2] and command[-3:] == FORK[-3:], name
        assert "2" in command or "WORLD_SIZE=2" in command, name
    in_place = LAUNCHERS["restart-launch-in-place"].command(training)
    assert commands.option(in_place, ("--max-restarts",)) == "9"
    assert commands.option(in_place, ("--shutdown-timeout",)) == "40"


@pytest.mark.parametrize("name", [name for name in LAUNCHERS if name.startswith("restart-launch")])
def test_the_launcher_takes_its_options(name: str) -> None:
    command = LAUNCHERS[name].command(split(FORK))
    plan = parse_launch(command[command.index("megatron.launch") + 1 :])  # standby ranks take no --master-port
    assert plan.standby == ("--standby" in command)


def test_a_command_of_another_launcher_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DrillError, match="^--stops: give a command that starts pretrain_gpt.py by megatron.launch"):
        split([sys.executable, "pretrain_gpt.py", "--num-layers", "2"])
    out = tmp_path / "out"
    assert main(["--out", str(out), "--stops", "1", "--", "torchrun", "pretrain_gpt.py"]) == 2
    assert "not torchrun ..." in capsys.readouterr().err


def test_the_result_shows_what_was_stopped_and_how_to_do_it_again() -> None:
    results = [
        StopResult(HELPER, "000.log", restarted=True, refused=2),
        StopResult(ASKED, "001.log", saved=5, cut_short=True),
        StopResult(ASKED, "002.log", wrong=["the ranks did not save at the stop"]),
    ]
    text = stop_tables(results, [], 40, seed=7, elapsed_s=120.0)
    assert "| SIGUSR1 of all | 0 | 0 | 0 | 2 | 0 |" in text and "| SIGKILL of helper | 0 | 0 | 0 | 0 | 1 |" in text
    assert "| deepspeed | 2 | 0 | 0 | 2 | 1 | 1 |" in text and "SIGTERM" not in text
    assert "| lazy | 1 | 0 | 0 | 0 |" in text and "2 launches were refused" in text
    assert "3 stops with seed 7 in 2.0 minutes: 1 ended with a save at the stop" in text
    assert "NOT VERIFIED: the ranks did not save at the stop: 002.log\n    python -m tools.restart_drill --out" in text
    assert f"--stop {ASKED}\n" in text and "verified" not in text.split("NOT VERIFIED")[0]
    assert stop_tables(results[:2], [], 40, seed=7, elapsed_s=1.0).endswith("\nverified\n")
    assert "NOT VERIFIED: cycle 3" in stop_tables(results[:2], ["cycle 3: another loss"], 40, seed=7, elapsed_s=1.0)


def test_a_stop_promises_a_save_only_while_its_job_trains() -> None:
    assert parse_stop(ASKED).saves and not parse_stop(HELPER).saves
    assert parse_stop(ASKED.removesuffix(",next=later")) == parse_stop(ASKED)
    assert not Stop("torchrun", 0, "lazy", "SIGTERM", "all", "load").saves


def job(directory: Path, *lines: str) -> list[str]:
    """The words of a soak of stops of a program that trains nothing: each rank is started by hand, and runs `lines`."""
    program = directory / "pretrain_gpt.py"
    program.write_text("\n".join(lines))
    stop = "launcher=by-hand,workers=0,engine=torch,signal=SIGKILL,target=all,moment=start-up,next=later"
    training = [sys.executable, "-m", "megatron.launch", "--nproc-per-node", "2", str(program)]
    return ["--out", str(directory / "out"), "--stops", "3", "--stop", stop, "--", *training]


def test_a_launch_that_ends_before_it_is_stopped_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random.Random, "uniform", lambda *_: 300.0)  # when it would be stopped
    assert main(job(tmp_path, "raise SystemExit(3)")) == 1
    results = json.loads((tmp_path / "out" / "stops.json").read_text())["stops"]
    assert [result["wrong"] for result in results] == [["the launch ended before the stop, with exit code 0"]] * 3


@pytest.mark.slow
def test_a_soak_of_stops_ends_when_it_is_told_to(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.restart_drill", *job(tmp_path, "import time", "time.sleep(600)")]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out" / "logs" / "000.log").exists():
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGTERM)
    _, told = running.communicate(timeout=300)
    assert running.returncode == 2 and "error: stopped by signal SIGTERM" in told, told
    assert not (tmp_path / "out" / "stops.json").exists(), "no stop counts"
    program = str(tmp_path / "pretrain_gpt.py")
    assert not [one.pid for one in psutil.process_iter(["cmdline"]) if program in (one.info["cmdline"] or [])]
