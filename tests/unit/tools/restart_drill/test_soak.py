"""The checks of a soak: growth of real processes, and what a launch leaves, as processes and in its directories."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.engines.registry import builtin_engines
from tests.unit.tools.restart_drill.test_faults import checkpoint
from tests.unit.tools.restart_drill.test_reference import TRAINING
from tools.restart_drill.checkpoints import Checkpoints, left_files
from tools.restart_drill.cli import main, parse_arguments
from tools.restart_drill.facts import CycleFacts
from tools.restart_drill.faults import DAMAGE, FAULTS, HOST
from tools.restart_drill.launch import LAUNCH_ID_VARIABLE, RankLocation
from tools.restart_drill.options import ENGINES, SOAK
from tools.restart_drill.plan import Injection
from tools.restart_drill.soak.engine_soak import lost_checkpoints
from tools.restart_drill.soak.growth import MIB, OTHERS, RANKS, RESTARTS, SAVES, Samples, Usage, grown
from tools.restart_drill.soak.hosts import Hosts
from tools.restart_drill.soak.schedule import LEFT_OUT, in_order, possible_faults, random_injection_point
from tools.restart_drill.soak.snapshot import Process, Snapshot, take
from tools.restart_drill.soak.soak import goals

LAUNCH = "a launch of this test"
# For each line it reads, it takes more of that resource, or takes and frees some, and then prints a line.
_PROGRAM = """
import os, sys, threading, subprocess
kept = []
for line in sys.stdin:
    what = line.strip()
    if what == "descriptors":
        kept.append(open(os.devnull))
    elif what == "threads":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif what == "memory":
        kept.append(bytearray(b"x" * (8 << 20)))
    elif what == "slots":
        slot = os.memfd_create("slot")
        os.posix_fallocate(slot, 0, 8 << 20)
    elif what == "processes":
        kept.append(subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
    elif what == "zombies":
        if os.fork() == 0:
            os._exit(0)
    else:
        file = open(os.devnull)
        content = bytearray(b"x" * (8 << 20))
        thread = threading.Thread(target=str)
        thread.start(), thread.join(), file.close()
        del content
    print("done", flush=True)
"""
# Starts a process that outlives it, and prints its process id.
_ORPHANS = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL).pid, flush=True)"


@contextlib.contextmanager
def launched(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process of LAUNCH. At the end no process of LAUNCH is left."""
    environment = os.environ | {LAUNCH_ID_VARIABLE: LAUNCH}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        while left := take(LAUNCH, "").processes:
            for one in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, 9)
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("leaks", "found"),
    [
        ("descriptors", ["3 more descriptors at the end"]),
        ("threads", ["3 more threads at the end"]),
        ("memory", ["MiB more memory at the end, and 16 are allowed"]),
        ("slots", ["3 more descriptors at the end", "MiB more memory at the end, and 16 are allowed"]),
        ("processes", ["3 more processes at the end"]),
        ("zombies", ["3 more processes at the end"]),
        ("nothing", []),
    ],
)
def test_a_leak_is_found(leaks: str, found: list[str]) -> None:
    samples = Samples()
    with launched(sys.executable, "-c", _PROGRAM) as process:
        assert process.stdin is not None and process.stdout is not None
        for _ in range(8):
            process.stdin.write(f"{leaks}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            samples.add(SAVES, "here", take(LAUNCH, ""), {})
    messages = [line for one in samples.growth().values() for line in one.excess(memory_MiB=16)]
    assert len(messages) == len(found), messages
    assert all(part in line for part, line in zip(found, messages, strict=True)), messages


def test_ranks_and_other_processes_are_sampled_separately() -> None:
    def snapshot(number: int) -> Snapshot:
        rank, writer = Process(2, 1, 0.0, "python", 1, 9, number << 20), Process(3, 2, 0.0, "python", 1, 9, 0)
        return Snapshot([Process(1, 0, 0.0, "python", 1, number, 0), rank, writer], 0, [], [])

    samples = Samples()
    for number in range(4):
        samples.add(SAVES, "a", snapshot(number), {0: RankLocation(2, "", "a"), 1: RankLocation(1, "", "b")})
        samples.add(RESTARTS, "a", snapshot(7), {0: RankLocation(2, "", "a")})
    growth = {key: found for key, found in samples.growth().items() if key[1] == SAVES or any(found)}
    assert growth == {
        (RANKS, SAVES, "a, ranks from 0"): Usage(memory=2 * MIB),
        (OTHERS, SAVES, "a, ranks from 0: python 1"): Usage(descriptors=2),
        (OTHERS, SAVES, "a, ranks from 0: processes and slots in total"): Usage(),
    }


def test_a_rank_that_returns_is_sampled_over_its_restarts() -> None:
    """The first time it has not returned yet. One in a new process begins anew."""
    samples = Samples()
    for number in range(5):
        returns, new = Process(2, 1, 0.0, "python", 3 + number, 9, 0), Process(10 + number, 1, 0.0, "python", 3, 9, 0)
        ranks = {0: RankLocation(2, "", "a"), 1: RankLocation(10 + number, "", "a")}
        samples.add(RESTARTS, "a", Snapshot([returns, new], 0, [], []), ranks)
    growth = {key: found for key, found in samples.growth().items() if key[:2] == (RANKS, RESTARTS) and any(found)}
    assert growth == {(RANKS, RESTARTS, "a, rank 0 in process 2"): Usage(threads=1)}


def test_an_orphaned_process_is_found(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path, own_shm=False)
    with launched("bash", "-c", f'{sys.executable} -c "{_ORPHANS}"; read') as process:
        assert process.stdout is not None
        left = int(process.stdout.readline())
        while len(take(LAUNCH, "").processes) > 2:  # its parent has not ended yet
            time.sleep(0.01)
        snapshots = hosts.snapshots(LAUNCH, 1)
        (found,) = hosts.new_orphans(LAUNCH, snapshots, 0.0)
        assert f"process {left} (sleep)" in found and hosts.new_orphans(LAUNCH, snapshots, 0.0) == []
        process.communicate("\n")
        (tmp_path / "torch_1234").touch()
        assert [line.partition(": ")[2] for line in hosts.left_over(LAUNCH, 0.0)] == [
            f"process {left} (sleep)", "in TMPDIR: torch_1234",
        ]  # fmt: skip


def test_work_in_progress_is_not_growth() -> None:
    saving, idle = Usage(3, 9, 20, 50 << 20), Usage(2, 4, 12, 40 << 20)
    assert grown([idle, saving, idle, saving]) == Usage()
    assert grown([idle, saving]) == grown([idle, saving, saving], max) == Usage()
    assert grown([saving, idle, saving, saving]).excess(0) and not grown([saving, idle, saving, saving], max).excess(0)
    assert grown([Usage(descriptors=number) for number in range(5)], max) == Usage(descriptors=1)
    assert grown([idle, idle, saving, saving]).excess(0) == [
        "1 more processes at the end", "5 more threads at the end", "8 more descriptors at the end",
        "10.0 MiB more memory at the end, and 0 are allowed",
    ]  # fmt: skip


def test_files_left_beside_checkpoints_are_found(tmp_path: Path) -> None:
    newest = [checkpoint(tmp_path, step) for step in (1, 2, 3)][-1]
    checkpoints = Checkpoints(tmp_path)
    assert left_files(checkpoints, 3) == []
    assert left_files(checkpoints, 2) == ["more than --keep-last 2 checkpoints: 3"]
    (newest / "half.tmp").touch()
    (tmp_path / ".incomplete_global_step4").mkdir()
    assert left_files(checkpoints, 3) == ["in --save: .incomplete_global_step4", "in global_step3: half.tmp"]
    (tmp_path / "global_step1" / "manifest.json").unlink()
    assert "in --save: global_step1" in left_files(checkpoints, 3)


def test_a_directory_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").touch()
    assert main(["--soak", "--out", str(tmp_path), "--minutes", "1"]) == 2
    assert f"--out {tmp_path}: already exists and is not of a soak with these options" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_soak_removes_its_own_checkpoints_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher is a stand-in that fails: what is looked at is what an earlier call had left."""
    launcher, place = tmp_path / "megatron" / "launch", tmp_path / "place"
    launcher.parent.mkdir()
    launcher.write_text("raise SystemExit(3)")
    argv = [
        "--soak",
        "--out",
        str(tmp_path / "out"),
        "--checkpoints",
        str(place),
        "--engines",
        "lazy",
        "--restarts",
        "1",
    ]
    command = [*argv, "--faults", "sigkill-all", "--", sys.executable, str(launcher), *TRAINING[1:]]
    other = checkpoint(place / "lazy", 9)
    assert main(command) == 2 and f"--checkpoints: {place / 'lazy'} is not empty" in capsys.readouterr().err
    assert other.is_dir()
    shutil.rmtree(place)
    (place / "lost+found").mkdir(parents=True)
    for _ in range(2):  # the second call goes on with the first one's soak
        assert main(command) == 2 and "the launch ended with exit code 3" in capsys.readouterr().err
        assert list((place / "lazy").iterdir()) == []
        checkpoint(place / "lazy", 9)


def test_saves_and_restarts_are_divided_among_the_engines() -> None:
    divided = goals(3, 2, None, 10, 5)
    assert [goal.restarts for goal in divided] == [2, 2, 1] and sum(goal.saves for goal in divided) >= 10
    assert [goal.first for goal in divided] == [0, 2, 4], "the engines share one sequence of faults"
    timed = goals(2, 2, 2.0, None, None)
    assert [goal.seconds for goal in timed] == [60.0, 60.0]


def test_no_engine_is_left_out_without_a_reason() -> None:
    assert {*ENGINES[SOAK], *LEFT_OUT} == set(builtin_engines())  # no reason names an engine that there is not
    assert parse_arguments(["--soak", "--out", "x"]).engines == ENGINES[SOAK]


def test_all_faults_are_injected_in_turn() -> None:
    assert all(bool(fault.soaks) != bool(fault.not_in_soaks) for fault in FAULTS.values())
    faults = possible_faults(on_nodes=False, fills_disk=False)
    assert set(possible_faults(on_nodes=False, fills_disk=True)) - set(faults) == {"disk-full"}
    order = in_order(faults, seed=1, first=0)
    drawn = [next(order) for _ in range(3 * len(faults))]
    assert all(set(drawn[i : i + len(faults)]) == set(faults) for i in range(0, len(drawn), len(faults)))
    later = in_order(faults, seed=1, first=7)
    assert [next(later) for _ in range(9)] == drawn[7:16]


@pytest.mark.parametrize("fault", [name for name, fault in FAULTS.items() if fault.soaks])
def test_every_fault_has_injection_points(fault: str) -> None:
    rng = random.Random(1)
    on_nodes = HOST not in FAULTS[fault].soaks
    found = [random_injection_point(fault, rng, on_nodes=on_nodes, in_training=False) for _ in range(100)]
    assert len(set(found)) > 1
    assert fault not in (*DAMAGE, "disk-full", "sigterm") or not any(point.during_restart for point in found)
    early = [random_injection_point(fault, rng, on_nodes=on_nodes, in_training=True) for _ in range(100)]
    assert not any(point.during_restart for point in early)


def injected(cycle: int, fault: str, expected: int, **other: Any) -> Injection:
    return Injection(cycle, fault, "mid-step", 0, 2, None, expected, **other)


def test_lost_checkpoints_are_found() -> None:
    cycles = {0: CycleFacts(committed=[1, 2, 3]), 1: CycleFacts(committed=[4, 5]), 2: CycleFacts(), 3: CycleFacts()}
    sound = [injected(0, "sigkill-all", 3), injected(1, "bitflip", 4, damaged="x"), injected(2, "sigkill-one", 4)]
    assert lost_checkpoints(cycles, sound) == []
    assert lost_checkpoints(cycles, [injected(0, "sigkill-all", 2)]) == [
        "cycle 0, sigkill-all: iteration 3 was saved, the newest that exists is 2"
    ]
    assert lost_checkpoints(cycles, [injected(0, "truncate", 1, damaged="x")]) == [
        "cycle 0, truncate: iteration 2 was saved, the newest that exists is 1"
    ]
    gone = [injected(1, "sigkill-node", 2, expected_tier="storage", lost_at_most=4)]
    assert lost_checkpoints(cycles, gone) == [], "saves in memory since the last one on storage"
    gone = [injected(1, "sigkill-node", 1, expected_tier="storage", lost_at_most=4)]
    assert lost_checkpoints(cycles, gone) == [
        "cycle 1, sigkill-node: iteration 2 was saved, the newest that exists is 1"
    ]
