"""drill.json: what each injected fault cost, phase by phase, and what was verified."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..common import page_cache
from ..common.formatting import number, plural
from ..common.tables import text_table
from . import command as commands
from .facts import CycleFacts, facts_of
from .launch import DrillError
from .plan import Injection, Plan, say
from .reference import Reference
from .verify import TOLERANCES, Verdict, check_losses, repeated, repetition_table, verdicts

ROOT = Path(__file__).absolute().parents[2]
_ANALYSIS = f"{__name__.split('.')[0]}.ckpt_analysis"
REFERENCE = "an uninterrupted reference run"
REPETITION = "iterations that several launches did; there was no reference run"
_OF_A_RESTART = ("restart_s", "phases", "accounted", "lost_steps", "lost_work_s", "failure_to_caught_up_s")


def report(plan: Plan, injections: list[Injection], reference: Reference | None, *, analysis: bool) -> bool:
    """Write drill.json and, with `analysis`, report.json; print the table. Returns whether all cycles are verified."""
    found = None
    if analysis:
        found = analysed(plan.trace_dir)
        (plan.out / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    content = content_of(plan, injections, reference, found)
    if reference is None and plan.command == plan.resumed_command and commands.repeats_exactly(plan.command):
        print(repetition_table(repeated(facts_of(plan.trace_dir))), end="\n\n")
    print(table(content))
    for cycle in content["cycles"]:
        for line in cycle["different"][:10]:
            say(f"cycle {cycle['cycle']}: {line}")
    return all(cycle["verified"] for cycle in content["cycles"])


def content_of(
    plan: Plan, injections: list[Injection], reference: Reference | None, report: dict[str, Any] | None
) -> dict[str, Any]:
    """Write drill.json. Returns its content."""
    tolerances = tolerances_of(plan.command)
    content = describe(injections, plan.supervisor, report, facts_of(plan.trace_dir), reference, *tolerances)
    (plan.out / "drill.json").write_text(json.dumps(content, indent=1) + "\n")
    return content


def tolerances_of(command: list[str]) -> tuple[float, float]:
    """Relative tolerances of losses: on another layout, and of a repeated iteration on the same one.

    If the command does not show its flags, bf16 is assumed.
    """
    config = commands.configuration(command)
    tolerance = TOLERANCES["bf16" if config is None else config.model.params_dtype]
    if commands.repeats_exactly(command):
        return tolerance, 0.0
    say(f"this training need not repeat its losses bit for bit (--deterministic off): compared within {tolerance:g}")
    return tolerance, tolerance


def analysed(trace_dir: Path) -> dict[str, Any]:
    """The JSON report of tools.ckpt_analysis. Raises DrillError if the analysis could not run."""
    command = [sys.executable, "-m", _ANALYSIS, str(trace_dir), "--format", "json"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if found.returncode != 0:
        raise DrillError(f"the analysis of {trace_dir} could not run: {found.stderr.strip()}")
    return json.loads(found.stdout)


def describe(
    injections: list[Injection],
    supervisor: str,
    report: dict[str, Any] | None,
    cycles: dict[int, CycleFacts],
    reference: Reference | None,
    tolerance: float,
    repeated_within: float = 0.0,
) -> dict[str, Any]:
    """Content of drill.json: for each injection the fault, the restart that followed it, and the verdict.

    `report` is the result of `analysed`; without one there are no durations.
    """
    restarts = {restart["cycle"]: restart for restart in report["restarts"]} if report is not None else {}
    losses = check_losses(cycles, None if reference is None else reference.facts, tolerance, repeated_within)
    entries = []
    for injection, verdict in zip(injections, verdicts(injections, cycles, losses), strict=True):
        told = replace(injection, cache=_cache(injection, cycles.get(injection.cycle + 1)))
        entries.append(_entry(told, restarts.get(injection.cycle + 1), verdict, cycles))
    return {
        "supervisor": supervisor,
        "losses_compared_with": REFERENCE if reference is not None else REPETITION,
        "reference": None if reference is None else str(reference.directory),
        "cycles": entries,
    }


def _cache(injection: Injection, restarted: CycleFacts | None) -> str:
    """Cold if it was found cold on the host of the drill, and all ranks that loaded from it ran there."""
    there = restarted is not None and restarted.hosts == {socket.gethostname()}
    return injection.cache if there else page_cache.WARM


def _entry(
    injection: Injection, restart: dict[str, Any] | None, verdict: Verdict, cycles: dict[int, CycleFacts]
) -> dict[str, Any]:
    following = injection.cycle + 1
    entry = asdict(injection) | {
        "resumed_step": verdict.resumed_step,
        "tier": verdict.tier,
        "layout": cycles[following].layout if following in cycles else None,
        "losses": verdict.losses,
        "state_hashes": verdict.state_hashes,
        "different": verdict.wrong,
        "verified": not verdict.wrong,
    }
    if restart is None or restart["restart_s"] is None:  # the next fault came before its first step
        return entry | dict.fromkeys(_OF_A_RESTART)
    phases = _phases(restart["parts"], injection.drill_s)
    return entry | {
        "restart_s": restart["restart_s"],
        "phases": phases,
        "accounted": 1 - phases["unattributed"] / restart["restart_s"],
        "lost_steps": restart["lost_steps"],
        "lost_work_s": restart["lost_work_s"],
        "failure_to_caught_up_s": restart["failure_to_caught_up_s"],
    }


def _phases(parts: dict[str, float], drill_s: float) -> dict[str, float]:
    """The parts of a restart; `drill` is what the drill itself did before it relaunched."""
    return parts | {"drill": drill_s, "relaunch": parts["relaunch"] - drill_s}


def table(content: dict[str, Any]) -> str:
    """A row for each injection; with saves in memory also the tier that was loaded, and a summary of the lost work."""
    cycles = content["cycles"]
    tiers = any(cycle["expected_tier"] for cycle in cycles)
    last = ("loaded from" if tiers else "cache", "verified")
    header = ("cycle", "fault", "injection point", "restart", "lost steps", "accounted", *last)
    rows = []
    for cycle in cycles:
        restart = "-" if cycle["restart_s"] is None else f"{cycle['restart_s']:.2f} s"
        lost = "-" if cycle["lost_steps"] is None else str(cycle["lost_steps"])
        what = (str(cycle["cycle"]), cycle["fault"], cycle["injection_point"])
        verified = "yes" if cycle["verified"] else "NO"
        read = (cycle["tier"] or "-").replace("_", " ") if tiers else cycle["cache"]
        rows.append((*what, restart, lost, number(cycle["accounted"], ".1%"), read, verified))
    text = "\n".join(text_table(header, rows, indent="", left=3))
    return f"{text}\n\n{lost_work(cycles)}" if tiers else text


def lost_work(cycles: list[dict[str, Any]]) -> str:
    """A sentence that compares the steps lost with the interval of saves, for each tier that loads read from."""
    parts = []
    for tier in dict.fromkeys(cycle["tier"] for cycle in cycles if cycle["tier"]):
        mine = [c for c in cycles if c["tier"] == tier and None not in (c["lost_steps"], c["lost_at_most"])]
        if mine:
            within = sum(cycle["lost_steps"] <= cycle["lost_at_most"] for cycle in mine)
            parts.append(
                f"from {tier.replace('_', ' ')} {within} of {plural(len(mine), 'restart')} lost at most "
                f"{plural(mine[0]['lost_at_most'], 'finished step')}, and none more than "
                f"{max(cycle['lost_steps'] for cycle in mine)}"
            )
    return f"Lost work: {'; '.join(parts)}." if parts else "Lost work: not known."
