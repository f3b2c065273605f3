"""One small run of the restart measurement, against the plain DeepSpeed script. What it measures is not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.harness import ROOT
from tests.dist.test_launch import environment, marked


@pytest.mark.slow
def test_restarts_of_both_kinds_are_measured(tmp_path: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.launchers", "--only", "fork-in-place", "plain", "--repeat", "1", "--dp",
            "1", "--dir", str(tmp_path), "--format", "json", "--time-limit", "120",
        ],
        env=environment(tmp_path), cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert (found["layout"], found["rounds"], found["target"]) == ({"tp": 2, "pp": 2, "dp": 1}, 1, 0.7)
    ours, plain = (found["variants"][name] for name in ("fork-in-place", "plain"))
    assert ours["samples_s"][0] > 0 and ours["ratio"] == ours["median_s"] / plain["median_s"]
    assert marked(tmp_path) == [] and list(tmp_path.iterdir()) == []
    assert set(os.listdir("/dev/shm")) == shared_memory
