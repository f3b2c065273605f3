"""One small run of the restart measurement, against the plain DeepSpeed script. What it measures is not judged here, so
the plain script need not take the time of its full imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.harness import HANGS_S, ROOT, wait_for
from tests.dist.test_launch import environment, marked
from tests.own_shm import in_own_shm, left_in_shm


@pytest.mark.slow
@pytest.mark.nightly(minutes=3)
def test_restarts_of_both_kinds_are_measured(tmp_path: Path) -> None:
    out, listing = tmp_path / "out", tmp_path / "shm"
    out.mkdir()
    lean = {"PYTHONPATH": f"{Path(__file__).with_name('scripts') / 'lean'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        in_own_shm([
            sys.executable, "-m", "benchmarks.launchers", "--only", "fork-in-place", "fork-standby", "plain",
            "--repeat", "1", "--dp", "1", "--dir", str(out), "--format", "json", "--time-limit", "300",
        ], listing),
        env=environment(tmp_path) | lean, cwd=ROOT, capture_output=True, text=True, timeout=3 * HANGS_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert (found["layout"], found["rounds"]) == ({"tp": 2, "pp": 2, "dp": 1}, 1)
    plain = found["variants"]["plain"]
    for name in ("fork-in-place", "fork-standby"):
        ours = found["variants"][name]
        assert ours["samples_s"][0] > 0 and ours["ratio"] == ours["median_s"] / plain["median_s"]
        assert ours["target"] == 0.03
    wait_for(lambda: marked(tmp_path) == [], "the end of all processes")
    assert list(out.iterdir()) == []
    assert left_in_shm(listing) == []
