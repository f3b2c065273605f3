"""MODE=scaled and MODE=replay of a preset's script, as a user runs them on a machine without GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpointing.store.manifest import parse_manifest, read_manifest_text
from tests.dist.harness import HANGS_S, ROOT
from tools.ckpt_plan.presets import config_for
from tools.ckpt_plan.rank_state import planned_files

pytestmark = pytest.mark.slow
SCRIPT = "examples_deepspeed/restart_bench/run_3b_tp4_pp1.sh"


def run(work: Path, **settings: str) -> Path:
    """Run the preset's script; returns the directory that it made in `work` for what it leaves."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    common = {"WORK_DIR": str(work), "SKIP_SETUP": "1", "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", str(ROOT / SCRIPT)],
        env=kept | common | settings,
        capture_output=True,
        text=True,
        timeout=2 * HANGS_S,
        cwd=work,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (left,) = work.glob(f"{settings['MODE']}-*")
    return left


def test_a_scaled_preset_is_killed_and_resumed_with_the_files_of_the_full_model(tmp_path: Path) -> None:
    left = run(tmp_path, MODE="scaled", TIME_LIMIT=str(HANGS_S))
    (cycle,) = json.loads((left / "drill.json").read_text())["cycles"]
    assert (cycle["verified"], cycle["resumed_step"]) == (True, 2)
    report = json.loads((left / "report.json").read_text())
    assert report["ranks"] == {"expected": 4, "present": 4}
    (label,) = {entry["label"] for entry in report["cycles"]}
    assert label.startswith("Scaled: layers and layout of 3b")
    assert label in (left / "report.txt").read_text() and label in (left / "ckpt_report.html").read_text()

    config, layout, vocab_sizes = config_for("3b", 4, 1, 1, None)
    ranks = (layout.coordinates(rank) for rank in range(layout.world_size))
    planned = {file.name for rank in ranks for file in planned_files(config, layout, rank, vocab_sizes)}
    saved = parse_manifest(read_manifest_text(left / "checkpoints" / "global_step4"))
    hashes = {name for name in saved["files"] if name.startswith("tensor_hashes_")}  # the drill asks for them
    assert set(saved["files"]) - hashes == planned


@pytest.mark.nightly(minutes=1)  # the suite has the cells of test_restart_sweep.py, which run the same program
def test_a_replay_of_a_preset_leaves_its_report(tmp_path: Path) -> None:
    left = run(tmp_path, MODE="replay", ENGINE="lazy", RANKS="0-1", LIMIT_BYTES="2MiB", REPEAT="1", STEPS_BETWEEN="0")
    figures = json.loads((left / "replay.json").read_text())
    assert list(figures["engines"]) == ["lazy"] and figures["engines"]["lazy"]["verified"]
    report = (left / "report.txt").read_text()
    assert "Replay: ranks 0-1 of 3b on TP4 x PP1 x DP1" in report
    assert (left / "ckpt_report.html").stat().st_size > 0
    assert list((tmp_path / "checkpoints").iterdir()) == []
