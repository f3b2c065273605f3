"""kill_at_iteration.py on a small real job: a launcher, ranks that are processes, a checkpoint in a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "examples_deepspeed" / "restart_bench"
RANKS = 3

JOB = '''
"""A launcher of ranks; a rank trains, prints what upstream prints, and saves every 5 iterations."""
import os, pathlib, subprocess, sys, time

work, behaviour = pathlib.Path(sys.argv[1]), sys.argv[2]
if "RANK" not in os.environ:
    launch = sum(1 for _ in work.glob("launcher_*"))
    (work / f"launcher_{launch}").write_text(str(os.getpid()))
    if behaviour == "second launch fails" and launch == 1:
        sys.exit(7)
    command = [sys.executable, __file__, *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env=os.environ | {"RANK": str(r)}, start_new_session=True)
        for r in range(int(sys.argv[3]))
    ]
    while all(rank.poll() is None for rank in ranks):
        time.sleep(0.01)
    codes = [rank.wait() for rank in ranks]
    sys.exit(any(codes) and behaviour != "hides failures")

rank = int(os.environ["RANK"])
saved = work / "saved"
start = int(saved.read_text()) if saved.exists() else 0
(work / f"pid_{rank}_{os.getpid()}").touch()
if behaviour == "has helpers" and rank == 0 and not start:  # a process that has left the rank's session
    helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (work / f"pid_helper_{helper.pid}").touch()
if rank == 0 and len(sys.argv) > 4:
    from megatron.restart_trace.cycles import claim_cycle, launch_key
    claim_cycle(pathlib.Path(sys.argv[4]), launch_key(os.environ), rank)
drift = 1e-6 if behaviour == "drifts" and start else 0.0
for i in range(start + 1, 13):
    time.sleep(2.0 if i == 9 and not start else 0.03)  # killed here, before the save at 10
    if rank == 0:
        loss = 5.0 / i + drift
        print(f" iteration {i:8d}/      12 | consumed samples: {8 * i} | lm loss: {loss:.6E} |", flush=True)
        if i % 5 == 0:
            saved.write_text(str(i))
    if behaviour == "hangs" and i == 3:
        time.sleep(600)
'''


@pytest.fixture
def job(tmp_path: Path) -> Path:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    return script


def drill_command(
    job: Path, behaviour: str, *options: str, ranks: int = RANKS, trace: bool = False
) -> list[str]:
    work = job.parent
    command = [sys.executable, str(BENCH / "kill_at_iteration.py"), "--log-dir", str(work / "logs"), *options]
    command += ["--trace-dir", str(work / "trace")] if trace else []
    command += ["--", sys.executable, str(job), str(work), behaviour, str(ranks)]
    return command + ([str(work / "trace")] if trace else [])


def drill(job: Path, behaviour: str, *options: str, **more: bool | int) -> subprocess.CompletedProcess[str]:
    """Run the drill, then assert that no process of the job is left."""
    done = subprocess.run(
        drill_command(job, behaviour, *options, **more),  # type: ignore[arg-type]
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert_all_gone(job)
    return done


def assert_all_gone(job: Path) -> None:
    pids = [int(path.name.split("_")[-1]) for path in job.parent.glob("pid_*")]
    pids += [int(path.read_text()) for path in job.parent.glob("launcher_*")]
    assert pids
    assert [pid for pid in pids if is_running(pid)] == []


def is_running(pid: int) -> bool:
    """True unless it has ended; orphans in a container may stay as zombies for want of an init that reaps."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def compare(job: Path) -> subprocess.CompletedProcess[str]:
    logs = [str(job.parent / "logs" / f"cycle_00{i}.log") for i in (0, 1)]
    return subprocess.run(
        [sys.executable, str(BENCH / "compare_losses.py"), *logs], capture_output=True, text=True, timeout=60
    )


def test_kills_every_rank_and_launches_again(job: Path) -> None:
    done = drill(job, "has helpers", "--iteration", "8", trace=True)
    assert done.returncode == 0, done.stderr
    assert f"SIGKILL to {RANKS + 1} ranks" in done.stderr  # the helper of rank 0 has its environment
    first, second = ((job.parent / "logs" / f"cycle_00{i}.log").read_text().splitlines() for i in (0, 1))
    assert 8 <= len(first) < 12
    assert " iteration        6/" in second[0]
    assert " iteration       12/" in second[-1]
    assert set(first + second) <= set(done.stdout.splitlines())

    same = compare(job)
    assert same.returncode == 0
    assert "identical, digit by digit" in same.stdout
    assert [line.split()[0] for line in same.stdout.splitlines()[1:4]] == ["6", "7", "8"]


def test_failure_records_are_in_order(job: Path) -> None:
    drill(job, "normal", "--iteration", "6", trace=True)
    lines = (job.parent / "trace" / "supervisor_000.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    failures = [record for record in records if record.get("operation") == "failure"]
    assert [record["phase"] for record in failures] == ["injected", "detected", "stopped", "relaunched"]
    assert {record["cycle"] for record in failures} == {0}
    assert len(list((job.parent / "trace").glob("cycle_*.json"))) == 2


def test_a_resumed_run_that_differs_is_found(job: Path) -> None:
    assert drill(job, "drifts", "--iteration", "8").returncode == 0
    differs = compare(job)
    assert differs.returncode == 1
    assert "DIFFER" in differs.stdout
    assert "lm loss 8.333333E-01 became 8.333343E-01" in differs.stdout


def test_logs_without_a_common_iteration_compare_to_nothing(job: Path) -> None:
    drill(job, "normal", "--iteration", "8")
    (job.parent / "logs" / "cycle_001.log").write_text(" iteration       12/      12 | lm loss: 1.0E+00 |\n")
    nothing = compare(job)
    assert nothing.returncode == 2
    assert "nothing was compared" in nothing.stderr


@pytest.mark.parametrize(
    ("behaviour", "options", "message"),
    [
        ("normal", ["--iteration", "13"], "ended with exit code 0 before it reported iteration 13"),
        ("hangs", ["--iteration", "8", "--time-limit", "2"], "iteration 8 was not reported within 2 s"),
        ("second launch fails", ["--iteration", "8"], "the second launch ended with exit code 7"),
        ("hides failures", ["--iteration", "8"], "ended with exit code 0 though its ranks were killed"),
    ],
)
def test_what_goes_wrong_is_said(job: Path, behaviour: str, options: list[str], message: str) -> None:
    done = drill(job, behaviour, *options)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


def test_a_command_without_ranks_is_not_killed(tmp_path: Path) -> None:
    script = "print(' iteration 8/ 12 | lm loss: 1 |', flush=True); import time; time.sleep(60)"
    command = [
        sys.executable,
        str(BENCH / "kill_at_iteration.py"),
        "--iteration",
        "8",
        "--log-dir",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", script], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert "no process of the command has RANK" in done.stderr


def test_stopping_the_drill_stops_the_job(job: Path) -> None:
    command = drill_command(job, "hangs", "--iteration", "8")
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while len(list(job.parent.glob("pid_*"))) < RANKS and time.monotonic() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=30)
    assert running.returncode == 1
    assert "SIGTERM" in errors
    assert_all_gone(job)
