"""A short soak of all engines, run by its command; .ci/nightly runs long ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.harness import HANGS_S, ROOT
from tests.dist.storage import small_disk
from tests.dist.test_save_directory import FORK, TRAINING
from tools.restart_drill.soak.cli import ENGINES
from tools.restart_drill.soak.schedule import HOST_FAULTS

DISK_BYTES = 64 << 20
RESTARTS, SAVES = 11, 80


@pytest.mark.slow
def test_saves_and_restarts_lose_and_leave_nothing(tmp_path: Path, dataset: list[str]) -> None:
    """Each fault is injected at least once. A second call has nothing more to do, and prints the same."""
    out, disk = tmp_path / "soak", tmp_path / "disk"
    with small_disk(disk, DISK_BYTES) as mounted:
        options = ["--out", str(out), "--saves", str(SAVES), "--restarts", str(RESTARTS), "--time-limit", str(HANGS_S)]
        options += ["--checkpoints", str(disk / "checkpoints")] if mounted else []
        command = [sys.executable, "-m", "tools.restart_drill.soak", *options, "--", *FORK, *dataset, *TRAINING]
        done, again = (
            subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5 * HANGS_S) for _ in range(2)
        )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    results = [json.loads((out / engine / "result.json").read_text()) for engine in ENGINES]
    injected = {fault for result in results for fault in result["faults"]}
    assert injected == set(HOST_FAULTS) - ({"disk-full"} if not mounted else set())
    assert sum(result["restarts"] for result in results) == sum(result["verified"] for result in results) == RESTARTS
    assert sum(result["saves"] for result in results) >= SAVES and all(
        result["compared"] > result["restarts"] for result in results
    )
    assert not any(result["lost"] or result["leaked"] or result["wrong"] for result in results)
    assert again.returncode == 0 and again.stdout == done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "saves"), [((), True), (("--shutdown-timeout", "0"), False)], ids=["", "a launcher that does not wait"]
)
def test_a_stop_saves_or_is_reported(tmp_path: Path, dataset: list[str], options: tuple[str, ...], saves: bool) -> None:
    """Of a job with data workers, while it evaluates. .ci/nightly draws many."""
    out = tmp_path / "soak"
    stop = "launcher=restart-launch,workers=4,engine=lazy,signal=SIGUSR1,target=all,moment=evaluation"
    command = [*FORK[:-1], *options, FORK[-1], *dataset, *TRAINING]
    done = subprocess.run(
        [sys.executable, "-m", "tools.restart_drill.soak", "--out", str(out), "--stops", "1", "--stop", stop,
         "--time-limit", str(HANGS_S), "--", *command],
        cwd=ROOT, capture_output=True, text=True, timeout=5 * HANGS_S,
    )  # fmt: skip
    assert done.returncode == (0 if saves else 1), done.stdout + done.stderr[-3000:]
    (result,) = json.loads((out / "stops.json").read_text())["stops"]
    assert (result["saved"] is not None) == saves and (result["wrong"] == []) == saves, result
    assert saves or result["wrong"][0] == "the ranks did not save at the stop" and f"--stop {stop}" in done.stdout
