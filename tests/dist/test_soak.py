"""A short soak, run by its command; .ci/nightly runs long ones, of all engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import HANGS_S, ROOT
from tests.dist.storage import small_disk
from tests.dist.test_save_directory import FORK, TRAINING
from tools.restart_drill.options import ENGINES, SOAK
from tools.restart_drill.soak.schedule import possible_faults

DISK_BYTES = 64 << 20
RESTARTS, SAVES = 11, 40
# One with threads of its own, one whose saves are in memory. What others leave behind, also those with processes of
# their own: tests/conformance/test_engine_processes.py; after kills: test_engines_training.py.
SAMPLED = ("lazy", "memory")


@pytest.mark.slow
def test_saves_and_restarts_lose_and_leave_nothing(tmp_path: Path, dataset: list[str]) -> None:
    """Each fault is injected at least once, with some engine. A second call has nothing more to do, and prints the
    same."""
    out, disk = tmp_path / "soak", tmp_path / "disk"
    with small_disk(disk, DISK_BYTES) as mounted:
        options = ["--out", str(out), "--saves", str(SAVES), "--restarts", str(RESTARTS), "--time-limit", str(HANGS_S)]
        options += ["--engines", ",".join(SAMPLED)]
        options += ["--checkpoints", str(disk / "checkpoints")] if mounted else []
        command = [sys.executable, "-m", "tools.restart_drill", "--soak", *options, "--", *FORK, *dataset, *TRAINING]
        done, again = (
            subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5 * HANGS_S) for _ in range(2)
        )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    results = [json.loads((out / engine / "result.json").read_text()) for engine in SAMPLED]
    injected = {fault for result in results for fault in result["faults"]}
    assert injected == set(possible_faults(on_nodes=False, fills_disk=mounted))
    assert set(SAMPLED) <= set(ENGINES[SOAK])
    assert sum(result["restarts"] for result in results) == sum(result["verified"] for result in results) == RESTARTS
    assert sum(result["saves"] for result in results) >= SAVES and all(
        result["compared"] > result["restarts"] for result in results
    )
    assert not any(result["lost"] or result["leaked"] or result["wrong"] for result in results)
    assert again.returncode == 0 and again.stdout == done.stdout


def stopped(out: Path, launcher: list[str], dataset: list[str], *stops: str) -> tuple[int, str, list[dict[str, Any]]]:
    """(exit code, output, results) of a soak of these stops of a job, one after the other."""
    chosen = [word for stop in stops for word in ("--stop", stop)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.restart_drill", "--out", str(out), "--stops", str(len(stops)), *chosen,
         "--time-limit", str(HANGS_S), "--", *launcher, *dataset, *TRAINING],
        cwd=ROOT, capture_output=True, text=True, timeout=5 * HANGS_S,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr[-3000:], json.loads((out / "stops.json").read_text())["stops"]


def two_stops(out: Path, dataset: list[str], *stops: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of two stops of megatron.launch, with which nothing is wrong."""
    exit_code, told, results = stopped(out, FORK, dataset, *(f"launcher=restart-launch,engine=lazy,{s}" for s in stops))
    assert exit_code == 0 and not any(result["wrong"] for result in results), told
    one, other = results
    return one, other


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stops_save_and_lose_nothing(tmp_path: Path, dataset: list[str]) -> None:
    """The launcher alone is killed and the next launch begins at once; then one takes over. .ci/nightly draws many."""
    killed, superseding = two_stops(
        tmp_path / "soak", dataset,
        "workers=0,signal=SIGKILL,target=launcher,moment=save,next=at-once",
        "workers=0,signal=SIGTERM,target=all,moment=training,next=take-over",
    )  # fmt: skip
    assert killed["saved"] is None and superseding["saved"] is not None
    assert superseding["log"].endswith(".beside"), "the launch that took over is the one that was stopped"


@pytest.mark.slow
@pytest.mark.nightly(minutes=2)
def test_stops_with_a_launch_beside_and_in_an_evaluation(tmp_path: Path, dataset: list[str]) -> None:
    """The suite has the like of them in test_save_directory.py and test_stop_signals.py."""
    beside, asked = two_stops(
        tmp_path / "soak", dataset,
        "workers=0,signal=SIGTERM,target=all,moment=training,next=beside",
        "workers=4,signal=SIGUSR1,target=all,moment=evaluation,next=later",
    )  # fmt: skip
    assert beside["refused"] >= 1 and None not in (beside["saved"], asked["saved"])


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)
def test_a_stop_that_breaks_a_promise_is_reported(tmp_path: Path, dataset: list[str]) -> None:
    """The launcher kills its ranks right after it has passed the signal on, before they have ended."""
    stop = "launcher=restart-launch,workers=4,engine=lazy,signal=SIGTERM,target=launcher,moment=evaluation,next=later"
    launcher = [*FORK[:-1], "--shutdown-timeout", "0", FORK[-1]]
    exit_code, told, (result,) = stopped(tmp_path / "soak", launcher, dataset, stop)
    assert exit_code == 1 and result["exit_code"] != 0, told
    # They may have saved before they were killed, of which the launcher knows nothing.
    not_saved = "the ranks did not save at the stop"
    assert (not_saved in result["wrong"]) == (result["saved"] is None), result
    assert f"exit code {result['exit_code']} after a save at the stop" in result["wrong"], result
    assert f"--stop {stop}" in told
