"""The drill's command line, its moments, and what it makes of an analysis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.restart_drill.cli import parse_arguments
from tools.restart_drill.drill import Strike
from tools.restart_drill.moments import STAGES, parse_moment, stage_begun_by
from tools.restart_drill.output import describe, table
from tools.restart_drill.verify import differences


def test_moments() -> None:
    assert all(parse_moment(stage).stage == stage for stage in STAGES)
    assert parse_moment("iteration:12").iteration == 12 and parse_moment("random:7").seed == 7
    assert [s for s in STAGES if parse_moment(s).strikes_a_restart] == ["mid-load", "mid-startup"]
    for text in ("mid-lunch", "iteration:", "iteration:x", "random", ""):
        with pytest.raises(ValueError, match="no such moment; there are mid-step, .*random:SEED"):
            parse_moment(text)


@pytest.mark.parametrize(
    ("record", "stage"),
    [
        ({"type": "iteration", "step": 3}, "mid-step"),
        ({"type": "operation_begin", "operation": "load"}, "mid-load"),
        ({"type": "operation_begin", "operation": "save"}, None),
        ({"type": "operation_end", "operation": "save", "outcome": "ok"}, "after-commit"),
        ({"type": "operation_end", "operation": "save", "outcome": "failed"}, None),
        ({"type": "span", "operation": "save", "phase": "collect"}, "mid-save-write"),
        ({"type": "span", "operation": "save", "phase": "barrier"}, "mid-save-before-commit"),
        ({"type": "span", "operation": "load", "phase": "barrier"}, None),
        ({"type": "span", "operation": "save", "phase": "commit", "detail": "manifest"}, "mid-save-commit"),
        ({"type": "span", "operation": "save", "phase": "commit", "detail": "publish"}, None),
        ({"type": "span", "operation": "startup", "phase": "imports"}, "mid-startup"),
    ],
)
def test_stages_of_a_trace(record: dict[str, Any], stage: str | None) -> None:
    assert stage_begun_by(record) == stage


def trace(directory: Path, cycle: int, losses: dict[int, float], rank: int = 0, tail: str = "") -> None:
    directory.mkdir(exist_ok=True)
    lines = [
        {"type": "iteration", "cycle": cycle, "step": step, "loss": loss} for step, loss in losses.items()
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + tail
    (directory / f"rank_{rank:05d}_cycle_{cycle:03d}.jsonl").write_text(text)


def test_every_loss_is_compared_with_the_reference(tmp_path: Path) -> None:
    trace(tmp_path / "reference", 0, {1: 5.0, 2: 4.0, 3: 3.0})
    struck = tmp_path / "struck"
    trace(struck, 0, {1: 5.0, 2: 4.0}, tail='{"type": "iteration", "cycle": 0, "st')
    trace(struck, 1, {2: 4.0, 3: 3.0000000001})
    trace(struck, 2, {4: 1.0})
    assert differences(struck, tmp_path / "reference") == {
        0: [],
        1: ["iteration 3: loss 3.0000000001, and 3.0 in the reference run"],
        2: ["iteration 4: loss 1.0, and None in the reference run"],
    }


def restart(cycle: int) -> dict[str, Any]:
    details = {"discover": {"at_critical_s": 0.25}, "load": {"at_critical_s": 0.5}}
    return {
        "cycle": cycle, "restart_s": 10.0, "wall": {"max_s": 6.0}, "resumed_step": 8, "lost_steps": 1,
        "lost_work_s": 0.1, "failure_to_caught_up_s": 11.0,
        "failure": {"detected_s": 1.0, "stopped_s": 1.5, "relaunched_s": 2.5},
        "phases": {
            "imports": {"at_critical_s": 4.0}, "load": {"at_critical_s": 0.75, "details": details},
            "first_step": {"at_critical_s": 1.0}, "caught_up": {"at_critical_s": 9.0},
        },
    }  # fmt: skip


def test_phases_follow_one_another_and_add_up() -> None:
    strikes = [Strike(0, "sigkill-all", "mid-step", 9, 2, 1), Strike(1, "sigstop", "mid-load", 0, 1, -19)]
    content = describe(strikes, {"restarts": [restart(1)]}, {0: [], 1: []})
    first, second = content["cycles"]
    assert first["phases"] == {
        "detect": 1.0, "stop": 0.5, "relaunch": 1.0, "launcher": 1.5, "imports": 4.0, "discover": 0.25, "load": 0.5,
        "first_step": 1.0, "unattributed": 0.25,
    }  # fmt: skip
    assert first["accounted"] == pytest.approx(0.975) and first["verified"]
    assert second["restart_s"] is None and second["verified"]
    assert table(content).count("yes") == 2
    content = describe(strikes[:1], {"restarts": [restart(1)]}, {0: [], 1: ["iteration 9: ..."]})
    assert not content["cycles"][0]["verified"] and "NO" in table(content)
    nothing_trained = describe(strikes[:1], {"restarts": [restart(1)]}, {0: []})
    assert not nothing_trained["cycles"][0]["verified"]


@pytest.mark.parametrize(
    "argv", [["--cycles", "0"], ["--at", "lunch"], ["--fault", "flood"], ["--out", "/"], ["--out", __file__]]
)
def test_a_wrong_command_line_ends_with_status_2(argv: list[str], tmp_path: Path) -> None:
    right = ["--fault", "sigkill-all", "--at", "mid-step", "--out", str(tmp_path / "new")]
    assert parse_arguments([*right, "--", "train"]).command == ["train"]
    with pytest.raises(SystemExit) as stopped:
        parse_arguments([*right, *argv, "--", "train"])
    assert stopped.value.code == 2
