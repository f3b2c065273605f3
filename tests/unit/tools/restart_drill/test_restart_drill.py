"""The drill's command line, its injection points, and what it makes of an analysis."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.restart_drill.facts import CycleFacts
from tools.restart_drill.faults import commits_needed
from tools.restart_drill.injection_points import STAGES, parse_injection_point, stage_begun_by
from tools.restart_drill.output import describe, table
from tools.restart_drill.plan import Injection, PlannedInjection, planned_injections
from tools.restart_drill.reference import Reference


def test_injection_points() -> None:
    assert all(parse_injection_point(stage).stage == stage for stage in STAGES)
    assert parse_injection_point("iteration:12").iteration == 12 and parse_injection_point("random:7").seed == 7
    assert [s for s in STAGES if parse_injection_point(s).during_restart] == ["mid-load", "mid-startup"]
    for text in ("mid-lunch", "iteration:", "iteration:x", "random", ""):
        with pytest.raises(ValueError, match="not an injection point; use one of mid-step, .*random:SEED"):
            parse_injection_point(text)


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


def restart(cycle: int) -> dict[str, Any]:
    return {
        "cycle": cycle, "restart_s": 10.0, "lost_steps": 1, "lost_work_s": 0.1, "failure_to_caught_up_s": 11.0,
        "parts": {"detect": 1.0, "stop": 0.5, "relaunch": 1.0, "launcher": 1.5, "imports": 5.75, "unattributed": 0.25},
    }  # fmt: skip


def trained(
    losses: dict[int, float], resumed: int | None = None, layout: tuple[int, int, int] = (1, 1, 1)
) -> CycleFacts:
    """A cycle of one rank, which resumed from a checkpoint and found its hashes right."""
    there = {} if resumed is None else {0: resumed}
    here = {socket.gethostname()}
    return CycleFacts(world_size=1, layout=layout, losses=losses, resumed=there, hashed=set(there), hosts=here)


REFERENCE = Reference(trained({9: 1.0}), Path("/drill/reference"))


def injection(cycle: int, fault: str = "sigkill-all", expected_step: int = 8, **fields: Any) -> Injection:
    return Injection(cycle, fault, "mid-step", 9, 2, 1, expected_step, **fields)


def test_a_page_cache_is_cold_only_if_all_ranks_are_on_the_host_where_it_was_dropped() -> None:
    cycles = {0: trained({9: 1.0}), 1: trained({9: 1.0}, resumed=8)}
    for others in (set(), {"node-without-a-drill"}):
        cycles[1].hosts |= others
        content = describe([injection(0, cache="cold")], "relaunch", None, cycles, REFERENCE, 0.0)
        assert content["cycles"][0]["cache"] == ("warm" if others else "cold")


def test_phases_follow_one_another_and_add_up() -> None:
    cycles = {0: trained({9: 1.0}), 1: trained({9: 1.0}, resumed=8), 2: trained({9: 1.0}, resumed=8)}
    injections = [injection(0, drill_s=0.75, cache="cold"), injection(1, "sigstop")]
    content = describe(injections, "relaunch", {"restarts": [restart(1)]}, cycles, REFERENCE, 0.0)
    assert content["supervisor"] == "relaunch" and "reference run" in content["losses_compared_with"]
    assert content["reference"] == "/drill/reference"
    first, second = content["cycles"]
    assert first["phases"] == {
        "detect": 1.0, "stop": 0.5, "relaunch": 0.25, "drill": 0.75, "launcher": 1.5, "imports": 5.75,
        "unattributed": 0.25,
    }  # fmt: skip
    assert first["accounted"] == pytest.approx(0.975) and first["verified"] and first["cache"] == "cold"
    assert (first["losses"], first["state_hashes"], first["resumed_step"]) == ("identical", "equal", 8)
    assert second["restart_s"] is None and second["verified"]
    assert table(content).count("yes") == 2 and table(content).count("cold") == 1

    cycles[1].losses[9] = 2.0
    content = describe(injections, "relaunch", {"restarts": [restart(1)]}, cycles, REFERENCE, 0.0)
    assert not content["cycles"][0]["verified"] and table(content).count("NO") == 2


ROOT = Path(__file__).resolve().parents[4]
RIGHT = ["--fault", "sigkill-all", "--at", "mid-step"]


NEVER_SAVES = """
import json, pathlib, sys
trace = pathlib.Path(sys.argv[sys.argv.index("--restart-trace-dir") + 1])
trace.mkdir(parents=True, exist_ok=True)
record = {"type": "iteration", "step": 1, "start_ns": 0, "end_ns": 1}
(trace / "rank_00000_cycle_000.jsonl").write_text(json.dumps(record) + "\\n")
"""


def test_a_training_without_a_checkpoint_cannot_be_drilled(tmp_path: Path) -> None:
    options = [*RIGHT, "--out", str(tmp_path / "out"), "--no-reference", "--quiet"]
    command = [sys.executable, "-m", "tools.restart_drill", *options, "--", sys.executable, "-c", NEVER_SAVES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    errors = done.stderr
    assert done.returncode == 2 and "before the injection point mid-step" in errors
    assert "No checkpoint was committed, and a fault is injected only after that: save more often" in errors


def test_a_fault_during_a_restart_needs_one_before() -> None:
    load, step = parse_injection_point("mid-load"), parse_injection_point("mid-step")
    assert [(i.fault, i.point.text) for i in planned_injections("sigstop", load, 2)] == [
        ("sigkill-all", "after-commit"), ("sigstop", "mid-load"), ("sigstop", "mid-load"),
    ]  # fmt: skip
    assert planned_injections("sigstop", step, 2) == (PlannedInjection("sigstop", step),) * 2


def test_checkpoints_that_a_fault_needs() -> None:
    assert [commits_needed("sigterm", first) for first in (True, False)] == [1, 0]
    assert [commits_needed("truncate", first) for first in (True, False)] == [2, 1]
