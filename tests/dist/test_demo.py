"""The demonstration, as a newcomer runs it, apart from the set-up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples_deepspeed" / "restart_bench" / "run_tiny_tp2_pp2_dp2.sh"


def run_demo(work: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    common = {
        "WORK_DIR": str(work),
        "DEVICE": "cpu",
        "SKIP_SETUP": "1",
        "PYTHON": sys.executable,
        "TIME_LIMIT": "120",
    }
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env=kept | common | settings,
        capture_output=True,
        text=True,
        timeout=280,
        cwd=work,
    )


@pytest.mark.slow
def test_killed_and_resumed_training_is_measured_and_exact(tmp_path: Path) -> None:
    done = run_demo(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "cycle 0: sigkill-all at iteration:8 struck " in done.stderr
    repeated, _, rest = done.stdout.partition("The repeated iterations are identical, to the last bit.")
    assert [line.split()[0] for line in repeated.splitlines()[-3:]] == ["6", "7", "8"]
    assert rest.count("sigkill-all") >= 2  # the drill's table and the report

    (demo,) = tmp_path.glob("demo-*")
    drill = json.loads((demo / "drill.json").read_text())
    assert "no reference run" in drill["losses_compared_with"] and not (demo / "reference").exists()
    (cycle,) = drill["cycles"]
    assert (cycle["verified"], cycle["resumed_step"], cycle["state_hashes"]) == (True, 5, "equal")
    assert cycle["accounted"] >= 0.98
    report = json.loads((demo / "report.json").read_text())
    assert (report["ranks"]["expected"], report["ranks"]["present"]) == (8, 8)
    saved = [(save["tag"], save["cycle"]) for save in report["saves"]]
    assert saved == [("global_step5", 0), ("global_step10", 1), ("global_step12", 1)]
    restart = report["restarts"][-1]
    assert restart["cycle"] == 1
    assert restart["lost_steps"] == 3
    assert restart["time_to_first_step_s"] > 0
    assert (demo / "report.txt").read_text() in done.stdout
    assert "restart_s" in (demo / "ckpt_report.html").read_text()
    assert "Next, try" in done.stdout

    # Started again where a checkpoint is, the script only resumes; what there is already is not built again.
    again = run_demo(tmp_path, SAVE_DIR=str(demo / "checkpoints"))
    assert again.returncode == 0, again.stderr[-3000:]
    assert "resuming from global_step12" in again.stderr
    assert "corpus and tokenizer" in again.stderr and "are there" in again.stderr
    assert "restart_drill" not in again.stderr
