"""The demonstration, as a newcomer runs it, apart from the set-up."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.dist.demo_runs import Demonstration, run_demo
from tests.dist.drill_reports import LEAST_ACCOUNTED


@pytest.mark.slow
def test_killed_and_resumed_training_is_measured_and_exact(demo: Demonstration, tmp_path: Path) -> None:
    done, directory = demo.done, demo.directory
    assert "cycle 0: sigkill-all at iteration:8 struck " in done.stderr
    repeated, _, rest = done.stdout.partition("The repeated iterations are identical, to the last bit.")
    assert [line.split()[0] for line in repeated.splitlines()[-3:]] == ["6", "7", "8"]
    assert rest.count("sigkill-all") >= 2  # the drill's table and the report

    drill = json.loads((directory / "drill.json").read_text())
    assert "no reference run" in drill["losses_compared_with"] and not (directory / "reference").exists()
    (cycle,) = drill["cycles"]
    assert (cycle["verified"], cycle["resumed_step"], cycle["state_hashes"]) == (True, 5, "equal")
    assert cycle["accounted"] >= LEAST_ACCOUNTED
    report = json.loads((directory / "report.json").read_text())
    assert (report["ranks"]["expected"], report["ranks"]["present"]) == (8, 8)
    saved = [(save["tag"], save["cycle"]) for save in report["saves"]]
    assert saved == [("global_step5", 0), ("global_step10", 1), ("global_step12", 1)]
    restart = report["restarts"][-1]
    assert restart["cycle"] == 1
    assert restart["lost_steps"] == 3
    assert restart["time_to_first_step_s"] > 0
    assert (directory / "report.txt").read_text() in done.stdout
    assert "restart_s" in (directory / "ckpt_report.html").read_text()
    assert "Next, try" in done.stdout

    # Started again where a checkpoint is, the script only resumes; what there is already is not built again.
    shutil.copytree(directory / "checkpoints", tmp_path / "checkpoints")
    again = run_demo(demo.work, SAVE_DIR=str(tmp_path / "checkpoints"))
    assert again.returncode == 0, again.stderr[-3000:]
    assert "resuming from global_step12" in again.stderr
    assert "corpus and tokenizer" in again.stderr and "are there" in again.stderr
    assert "restart_drill" not in again.stderr
