"""A few rounds of kills and relaunches in one directory; the command does as many as it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.harness import ROOT
from tests.dist.test_save_directory import FORK, TRAINING


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_checkpoint_is_lost_in_some_rounds(tmp_path: Path, dataset: list[str]) -> None:
    """The seed draws a launch beside, one that takes over, and a kill of the launcher alone."""
    out = tmp_path / "rounds"
    done = subprocess.run(
        [
            sys.executable, "-m", "tools.restart_drill", "--out", str(out), "--rounds", "3", "--seed", "146",
            "--engines", "lazy", "--", *FORK, *dataset, *TRAINING,
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "| verified |" in (out / "rounds.md").read_text()
