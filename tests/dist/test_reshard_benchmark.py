"""The redistribution benchmark, end to end, on a state so small that only its working is tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reshard.plan import VARIANTS
from tests.dist.harness import ROOT


@pytest.mark.nightly(minutes=2)
def test_every_variant_is_measured_on_every_rank_and_nothing_is_left(tmp_path: Path) -> None:
    """It compares the bits that each variant restored by itself, and fails if they differ."""
    done = subprocess.run(
        [
            sys.executable, "-m", "benchmarks.reshard", "--bytes", "24MiB", "--repeat", "1", "--onto", "1,4,1",
            "--dir", str(tmp_path), "--format", "json",
        ],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["measurements"]
    assert found["layout"] == [1, 4, 1]
    assert set(found["seconds"]) == set(VARIANTS)
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found["seconds"].values())
    assert not list(tmp_path.iterdir())
