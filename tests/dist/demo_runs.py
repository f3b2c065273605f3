"""Runs the demonstration as a newcomer does, apart from the set-up."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.dist.harness import HANGS_S, ROOT
from tests.dist.hold import held_environment

SCRIPT = ROOT / "examples_deepspeed" / "restart_bench" / "run_tiny_tp2_pp2_dp2.sh"


@dataclass(frozen=True)
class Demonstration:
    """One that ended well. `directory` is what it left in its WORK_DIR, `work`."""

    done: subprocess.CompletedProcess[str]
    work: Path
    directory: Path


def run_demo(work: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """The ranks of the launch that is struck wait for it once they have done iteration 8, where it is to come.

    They are forked, where the default launcher has each of the eight import torch: `settings` may say otherwise.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    common = {
        "WORK_DIR": str(work),
        "DEVICE": "cpu",
        "SKIP_SETUP": "1",
        "PYTHON": sys.executable,
        "TIME_LIMIT": str(HANGS_S),
        "LAUNCHER": "fork",
        **held_environment(cycles=1, after=8),
    }
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env=kept | common | settings,
        capture_output=True,
        text=True,
        timeout=3 * HANGS_S,
        cwd=work,
    )
