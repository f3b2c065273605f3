"""Small runs of both comparisons of restarts, each with the plain DeepSpeed script. What they measure is not judged
here, so the plain script need not take the time of its full imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import HANGS_S, ROOT, wait_for
from tests.dist.test_launch import environment, marked
from tests.own_shm import in_own_shm, left_in_shm

pytestmark = pytest.mark.slow


def measured(benchmark: str, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of one round of `benchmark`; checks that it leaves no process and no file."""
    out, listing = tmp_path / "out", tmp_path / "shm"
    out.mkdir()
    lean = {"PYTHONPATH": f"{Path(__file__).with_name('scripts') / 'lean'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", benchmark, "--repeat", "1", "--dir", str(out), "--format", "json", *arguments]
    done = subprocess.run(
        in_own_shm(command, listing), env=environment(tmp_path) | lean, cwd=ROOT, capture_output=True, text=True,
        timeout=5 * HANGS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    wait_for(lambda: marked(tmp_path) == [], "the end of all processes")
    assert list(out.iterdir()) == []
    assert left_in_shm(listing) == []
    return json.loads(done.stdout)


@pytest.mark.nightly(minutes=3)
def test_restarts_of_both_kinds_are_measured(tmp_path: Path) -> None:
    found = measured("benchmarks.launchers", tmp_path, "--only", "fork-in-place", "fork-standby", "plain", "--dp", "1")
    assert (found["layout"], found["rounds"]) == ({"tp": 2, "pp": 2, "dp": 1}, 1)
    plain = found["variants"]["plain"]
    for name in ("fork-in-place", "fork-standby"):
        ours = found["variants"][name]
        assert ours["samples_s"][0] > 0 and ours["ratio"] == ours["median_s"] / plain["median_s"]
        assert ours["target"] == 0.03


@pytest.mark.nightly(minutes=3)
def test_contestants_come_back_with_the_losses_of_a_run_without_a_fault(tmp_path: Path) -> None:
    names = ("plain", "fork-in-place")
    arguments = ["--only", *names, "--faults", "2", "--ranks", "2"]
    found = measured("benchmarks.restart_scoreboard", tmp_path, *arguments)
    assert found["ranks"] == 2
    plain = found["contestants"]["plain"]
    for name in names:
        row = found["contestants"][name]
        assert row["not_run"] is None, row
        assert [fault["kind"] for fault in row["faults"]] == ["one", "all"]
        for fault in row["faults"]:
            assert fault["lost_steps"] == 3 and 0 < fault["restart_s"] < fault["wasted_s"] + row["iteration_s"]
        # Iterations 8 and 13 are reached, and three are done again after each.
        assert row["wrong_losses"] == 0 and row["losses"] >= 13 + 6
        assert row["ratio"] == {
            kind: row["restart_s"][kind]["median"] / plain["restart_s"][kind]["median"] for kind in ("one", "all")
        }
