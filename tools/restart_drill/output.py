"""drill.json: what each strike cost, phase by phase, and whether all of it was verified."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..common.formatting import number, plural
from ..common.tables import text_table
from .facts import CycleFacts
from .launch import DrillError
from .plan import Strike
from .reference import Reference
from .verify import Verdict, check_losses, judge

ROOT = Path(__file__).resolve().parents[2]
_ANALYSIS = f"{__name__.split('.')[0]}.ckpt_analysis"
REFERENCE = "an uninterrupted reference run"
REPETITION = "iterations that several launches did; there was no reference run"
_OF_A_RESTART = ("restart_s", "phases", "accounted", "lost_steps", "lost_work_s", "caught_up_s")


def analysed(trace_dir: Path) -> dict[str, Any]:
    """The JSON of tools.ckpt_analysis. Raises DrillError if it could not run."""
    command = [sys.executable, "-m", _ANALYSIS, str(trace_dir), "--format", "json"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode > 1:  # 1: it has findings
        raise DrillError(f"the analysis of {trace_dir} could not run: {found.stderr.strip()}")
    return json.loads(found.stdout)


def describe(
    strikes: list[Strike],
    supervisor: str,
    report: dict[str, Any] | None,
    cycles: dict[int, CycleFacts],
    reference: Reference | None,
    tolerance: float,
    repeated: float = 0.0,
) -> dict[str, Any]:
    """Content of drill.json: for each strike what it was, the restart that followed it, and the verdict.

    `report` is what `analysed` returned; without one there are no durations.
    """
    restarts = {restart["cycle"]: restart for restart in report["restarts"]} if report is not None else {}
    losses = check_losses(cycles, None if reference is None else reference.facts, tolerance, repeated)
    told = []
    for strike in strikes:
        verdict = judge(strike, cycles, losses)
        told.append(_cycle(strike, restarts.get(strike.cycle + 1), verdict, cycles))
    return {
        "supervisor": supervisor,
        "losses_compared_with": REFERENCE if reference is not None else REPETITION,
        "reference": None if reference is None else str(reference.directory),
        "cycles": told,
    }


def _cycle(
    strike: Strike, restart: dict[str, Any] | None, verdict: Verdict, cycles: dict[int, CycleFacts]
) -> dict[str, Any]:
    told = asdict(strike) | {
        "resumed_step": verdict.resumed_step,
        "tier": verdict.tier,
        "layout": cycles[strike.cycle + 1].layout if strike.cycle + 1 in cycles else None,
        "losses": verdict.losses,
        "state_hashes": verdict.state_hashes,
        "different": verdict.wrong,
        "verified": not verdict.wrong,
    }
    if restart is None or restart["restart_s"] is None:  # struck again before its first step
        return told | dict.fromkeys(_OF_A_RESTART)
    phases = _phases(restart, strike.drill_s)
    return told | {
        "restart_s": restart["restart_s"],
        "phases": phases,
        "accounted": 1 - phases["unattributed"] / restart["restart_s"],
        "lost_steps": restart["lost_steps"],
        "lost_work_s": restart["lost_work_s"],
        "caught_up_s": restart["failure_to_caught_up_s"],
    }


def _phases(restart: dict[str, Any], drill_s: float) -> dict[str, float]:
    """Seconds that follow one another, from the failure to the first step, on the rank that took longest.

    `drill` is what the drill itself did before it relaunched. `launcher` is from the relaunch until that rank's process
    existed.
    """
    failure, startup = restart["failure"], restart["wall"]["max_s"]
    detected, stopped, relaunched = (failure[name] for name in ("detected_s", "stopped_s", "relaunched_s"))
    found = {
        "detect": detected,
        "stop": stopped - detected,
        "drill": drill_s,
        "relaunch": relaunched - stopped - drill_s,
        "launcher": restart["restart_s"] - relaunched - startup,
    }
    for name, phase in restart["phases"].items():
        if name == "caught_up":
            continue
        if name == "load":
            found |= _parts_of_load(phase)
            continue
        found[name] = phase["at_critical_s"]
    return found | {"unattributed": restart["restart_s"] - sum(found.values())}


def _parts_of_load(phase: dict[str, Any]) -> dict[str, float]:
    """Phases of a load, which follow one another. Threads may be in two of them at once: that time counts once, and
    is taken from the longest."""
    parts = {part: values["at_critical_s"] for part, values in phase.get("details", {}).items()}
    twice = sum(parts.values()) - phase["at_critical_s"]
    if parts and twice > 0:
        longest = max(parts, key=lambda part: parts[part])
        parts[longest] = max(0.0, parts[longest] - twice)
    return parts


def table(content: dict[str, Any]) -> str:
    """A line for each strike; where saves are kept in memory, also where each load read, and what was lost in all."""
    cycles = content["cycles"]
    tiers = any(cycle["expected_tier"] for cycle in cycles)
    header = ("cycle", "fault", "moment", "restart", "lost", "accounted", "from" if tiers else "cache", "verified")
    rows = []
    for cycle in cycles:
        restart = "-" if cycle["restart_s"] is None else f"{cycle['restart_s']:.2f} s"
        lost = "-" if cycle["lost_steps"] is None else f"{cycle['lost_steps']} steps"
        what = (str(cycle["cycle"]), cycle["fault"], cycle["moment"])
        verified = "yes" if cycle["verified"] else "NO"
        read = (cycle["tier"] or "-").replace("_", " ") if tiers else cycle["cache"]
        rows.append((*what, restart, lost, number(cycle["accounted"], ".1%"), read, verified))
    text = "\n".join(text_table(header, rows, indent="", left=3))
    return f"{text}\n\n{lost_work(cycles)}" if tiers else text


def lost_work(cycles: list[dict[str, Any]]) -> str:
    """How many finished steps were lost, against the steps between two saves where each load read."""
    told = []
    for tier in dict.fromkeys(cycle["tier"] for cycle in cycles if cycle["tier"]):
        mine = [c for c in cycles if c["tier"] == tier and None not in (c["lost_steps"], c["lost_at_most"])]
        if mine:
            within = sum(cycle["lost_steps"] <= cycle["lost_at_most"] for cycle in mine)
            told.append(
                f"from {tier.replace('_', ' ')} {within} of {plural(len(mine), 'restart')} lost at most "
                f"{plural(mine[0]['lost_at_most'], 'finished step')}, and none more than "
                f"{max(cycle['lost_steps'] for cycle in mine)}"
            )
    return f"Lost work: {'; '.join(told)}." if told else "Lost work: not known."
