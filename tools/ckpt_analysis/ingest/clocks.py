"""Maps the monotonic clocks of all processes to Unix time, by one offset for each clock.

All processes of one boot of a host read the same monotonic clock. They share one offset, so their differences stay
exact, also between cycles. Between hosts the comparison is as exact as their wall clocks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..common.problems import Problem

_STEP_NS = 50_000_000  # time services slew; a larger disagreement of anchors means that a wall clock was stepped


def clock_of(process: dict[str, Any]) -> str:
    """Name of the monotonic clock that a process reads: its boot id, else its host."""
    return process["boot_id"] or process["host"]


def offsets_ns(processes: list[dict[str, Any]]) -> dict[str, int]:
    """Unix time minus monotonic time of each clock, in ns: by the anchor read with the least error."""
    best: dict[str, tuple[int, int]] = {}
    for process in processes:
        candidate = (process["anchor_error_ns"], process["wall_ns"] - process["monotonic_ns"])
        clock = clock_of(process)
        best[clock] = min(best.get(clock, candidate), candidate)
    return {clock: offset for clock, (_, offset) in best.items()}


def check_clocks(processes: list[dict[str, Any]], corrected: Collection[str]) -> list[Problem]:
    """Several clocks, and wall clocks that were stepped between processes.

    `corrected`: the clocks whose times were shifted by what barriers show, so they no longer rest on a wall clock.
    """
    problems: list[Problem] = []
    hosts: dict[str, set[str]] = {}
    offsets: dict[str, list[int]] = {}
    for process in processes:
        clock = clock_of(process)
        hosts.setdefault(clock, set()).add(process["host"])
        offsets.setdefault(clock, []).append(process["wall_ns"] - process["monotonic_ns"])
    trusted = len(hosts.keys() - corrected)
    if trusted > 1:
        which = "the other hosts" if trusted < len(hosts) else "hosts"
        message = f"times between {which} are as exact as their {trusted} wall clocks, on a rank exact"
        problems.append(Problem("several_clocks", message, {"clocks": trusted}))
    for clock, values in offsets.items():
        step = max(values) - min(values)
        if step > _STEP_NS:
            names = ", ".join(sorted(hosts[clock]))
            message = (
                f"the wall clock of {names} moved by {step / 1e9:.3f} s against its monotonic clock during "
                "the run: times between this and other hosts may be wrong by as much"
            )
            problems.append(Problem("clock_step", message, {"hosts": sorted(hosts[clock]), "step_s": step / 1e9}))
    return problems
