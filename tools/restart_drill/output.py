"""drill.json: what each strike cost, phase by phase, and whether all of it was verified."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.restart_drill.drill import Strike
from tools.restart_drill.launch import DrillError

ROOT = Path(__file__).resolve().parents[2]


def analysed(trace_dir: Path) -> dict[str, Any]:
    """The JSON of tools.ckpt_analysis. Raises DrillError if it could not run."""
    command = [sys.executable, "-m", "tools.ckpt_analysis", str(trace_dir), "--format", "json"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode > 1:  # 1: it has findings
        raise DrillError(f"the analysis of {trace_dir} could not run: {found.stderr.strip()}")
    return json.loads(found.stdout)


def describe(
    strikes: list[Strike], report: dict[str, Any], differences: dict[int, list[str]]
) -> dict[str, Any]:
    """Content of drill.json: for each strike what it was, and the restart that followed it."""
    restarts = {restart["cycle"]: restart for restart in report["restarts"]}
    return {"cycles": [_cycle(strike, restarts.get(strike.cycle + 1), differences) for strike in strikes]}


def _cycle(
    strike: Strike, restart: dict[str, Any] | None, differences: dict[int, list[str]]
) -> dict[str, Any]:
    following = strike.cycle + 1
    different = differences.get(following, []) + differences.get(strike.cycle, [])
    told = asdict(strike) | {"different": different}
    if restart is None or restart["restart_s"] is None:  # struck again before its first step
        missing = dict.fromkeys(
            ("restart_s", "phases", "accounted", "lost_steps", "lost_work_s", "caught_up_s")
        )
        return told | missing | {"verified": not different}
    phases = _phases(restart)
    return told | {
        "restart_s": restart["restart_s"],
        "phases": phases,
        "accounted": 1 - phases["unattributed"] / restart["restart_s"],
        "resumed_step": restart["resumed_step"],
        "lost_steps": restart["lost_steps"],
        "lost_work_s": restart["lost_work_s"],
        "caught_up_s": restart["failure_to_caught_up_s"],
        "verified": not different and following in differences,
    }


def _phases(restart: dict[str, Any]) -> dict[str, float]:
    """Seconds that follow one another, from the failure to the first step, on the rank that took longest.

    `launcher` is from the relaunch until that rank's process existed.
    """
    failure, startup = restart["failure"], restart["wall"]["max_s"]
    detected, stopped, relaunched = (failure[name] for name in ("detected_s", "stopped_s", "relaunched_s"))
    found = {
        "detect": detected,
        "stop": stopped - detected,
        "relaunch": relaunched - stopped,
        "launcher": restart["restart_s"] - relaunched - startup,
    }
    for name, phase in restart["phases"].items():
        if name == "caught_up":
            continue
        if name == "load":
            found |= {part: values["at_critical_s"] for part, values in phase.get("details", {}).items()}
            continue
        found[name] = phase["at_critical_s"]
    return found | {"unattributed": restart["restart_s"] - sum(found.values())}


def table(content: dict[str, Any]) -> str:
    """A line for each strike."""
    lines = [
        f"{'cycle':>5}  {'fault':14}  {'moment':22}  {'restart':>9}  {'lost':>10}  {'accounted':>9}  verified"
    ]
    for cycle in content["cycles"]:
        restart = "-" if cycle["restart_s"] is None else f"{cycle['restart_s']:.2f} s"
        lost = "-" if cycle["lost_steps"] is None else f"{cycle['lost_steps']} steps"
        accounted = "-" if cycle["accounted"] is None else f"{cycle['accounted']:.1%}"
        verified = "yes" if cycle["verified"] else "NO"
        lines.append(
            f"{cycle['cycle']:>5}  {cycle['fault']:14}  {cycle['moment']:22}  {restart:>9}  {lost:>10}  "
            f"{accounted:>9}  {verified}"
        )
    return "\n".join(lines)
