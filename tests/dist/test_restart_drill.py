"""The restart drill over real trainings: real launchers, real faults, every cycle verified, nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.dist.harness import LLAMA_STYLE, ROOT

TRAINING = [
    *LLAMA_STYLE, "--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "96", "--num-attention-heads", "4",
    "--seq-length", "64", "--bf16", "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "100",
    "--lr", "1e-3", "--log-interval", "1", "--save-interval", "5", "--keep-last", "2", "--exit-signal-handler",
]  # fmt: skip
MARK = "RESTART_DRILL_TEST"


def drill(
    out: Path, dataset: list[str], fault: str, moment: str, *options: str, training: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the drill over a training of two DP ranks under torchrun; no process of it may be left."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(ROOT / "pretrain_gpt.py"), *dataset, *TRAINING, *training]
    argv = ["--fault", fault, "--at", moment, "--out", str(out), "--quiet", "--time-limit", "60", *options]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "tools.restart_drill", *argv, "--", *command],
        env=kept | {"OMP_NUM_THREADS": "1", MARK: str(out)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert left_of(out) == []
    return done


def left_of(out: Path) -> list[int]:
    """Processes that carry the mark of this drill."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(out):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return found


def cycles(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "drill.json").read_text())["cycles"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "moment", "engine", "number"),
    [
        ("sigkill-all", "mid-save-write", "lazy", 2),
        ("sigkill-one", "mid-step", "torch", 1),
        ("sigkill-node", "mid-save-commit", "lazy", 1),
        ("sigkill-one", "mid-save-before-commit", "torch", 1),
        ("sigstop", "after-commit", "lazy", 1),
        ("sigterm", "random:3", "torch", 1),
    ],
)
def test_every_cycle_is_verified_and_accounted_for(
    tmp_path: Path, dataset: list[str], fault: str, moment: str, engine: str, number: int
) -> None:
    out = tmp_path / "drill"
    options = ["--cycles", str(number), "--hang-limit", "4"]
    done = drill(out, dataset, fault, moment, *options, training=("--checkpoint-engine", engine))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = cycles(out)
    assert len(found) == number
    for cycle in found:
        assert (cycle["fault"], cycle["moment"], cycle["verified"]) == (fault, moment, True)
        phases = cycle["phases"]
        assert sum(phases.values()) == pytest.approx(cycle["restart_s"])
        assert {"detect", "stop", "relaunch", "imports", "load", "first_step"} <= set(phases)
        assert min(phases.values()) > -1e-6, phases
        assert cycle["accounted"] >= 0.98, phases
        assert cycle["lost_steps"] <= 5
        if fault == "sigstop":
            assert phases["detect"] >= 4.0
        if fault == "sigterm":
            assert cycle["exit_code"] == 0 and cycle["lost_steps"] == 0
    assert "yes" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["mid-load", "mid-startup"])
def test_a_restart_is_struck_itself(tmp_path: Path, dataset: list[str], moment: str) -> None:
    out = tmp_path / "drill"
    done = drill(out, dataset, "sigkill-all", moment, training=("--checkpoint-engine", "lazy"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    first, second = cycles(out)
    assert first["restart_s"] is None and first["moment"] == "after-commit"
    assert second["moment"] == moment and second["restart_s"] > 0 and second["verified"]


def test_what_cannot_be_drilled_is_said(tmp_path: Path, dataset: list[str]) -> None:
    done = drill(tmp_path / "a", dataset, "sigkill-all", "iteration:3")
    assert done.returncode == 2
    assert "error: --at iteration:3: no checkpoint was committed before" in done.stderr
    done = drill(tmp_path / "b", dataset, "sigkill-all", "iteration:500")
    assert done.returncode == 2
    assert "ended with exit code 0 before the moment iteration:500 had come" in done.stderr
    done = drill(tmp_path / "c", dataset, "sigkill-all", "mid-step", training=("--hidden-size", "65"))
    assert done.returncode == 2 and "before the moment mid-step had come; see its log" in done.stderr
    done = drill(tmp_path / "d", dataset, "sigkill-all", "iteration:90", "--time-limit", "3")
    assert done.returncode == 2 and "did not come within 3 s; raise --time-limit" in done.stderr
