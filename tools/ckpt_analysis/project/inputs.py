"""The numbers that a projection starts from, each with its source: measured in a run, or given by a flag."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from restart_trace.schema import STORAGE

from ..common.errors import CouldNotRunError
from ..metrics.results import StartStats
from ..metrics.tiers import NEAREST_FIRST
from ..report import Report

MEASURED, GIVEN = "measured", "given"


@dataclass(frozen=True)
class Input:
    """One input. `source` is "measured" or "given"; `note` says how, or by which flag."""

    name: str
    value: float
    unit: str
    source: str
    note: str


@dataclass(frozen=True)
class Ran:
    """What the measured inputs ran on. `ranks`: None if they were not all that the nodes hold, as of a replay."""

    nodes: int
    ranks: int | None


@dataclass(frozen=True)
class Given:
    """Flags that overrule measurements; None: take the measured number."""

    blocked_s: float | None = None
    durable_s: float | None = None
    restart_s: float | None = None
    step_s: float | None = None
    checkpoint_bytes: float | None = None
    tier: str | None = None  # restarts from this tier alone


@dataclass(frozen=True)
class Inputs:
    """All inputs of a projection; `checkpoint_bytes` is None if it is neither measured nor given.

    `ran`: None if no time was measured, or nothing tells on how many nodes.
    """

    blocked_s: Input
    durable_s: Input
    restart_s: Input
    step_s: Input
    checkpoint_bytes: Input | None
    ran: Ran | None

    @property
    def times(self) -> list[Input]:
        return [self.blocked_s, self.durable_s, self.restart_s, self.step_s]

    @property
    def listed(self) -> list[Input]:
        known = [*self.times, self.checkpoint_bytes]
        return [entry for entry in known if entry is not None]


def gather(report: Report | None, given: Given) -> Inputs:
    """Inputs from `report` where no flag overrules it.

    Raises CouldNotRunError naming the flag, if a number is neither measured nor given, or cannot be.
    """
    if given.tier is not None and report is None:
        raise CouldNotRunError(f"--tier {given.tier}: chooses among the restarts of a run; give a LOGDIR")
    _refuse_share(report, given)
    blocked, num_bytes = _median_of_saves(report, "blocked_s", "blocked_s, slowest rank"), _bytes(report)
    inputs = Inputs(
        blocked_s=_one("blocked_s", "s", given.blocked_s, "--blocked-seconds", blocked),
        durable_s=_one("durable_s", "s", given.durable_s, "--durable-seconds", _durable(report, given.tier)),
        restart_s=_one("restart_s", "s", given.restart_s, "--restart-seconds", _restart(report, given)),
        step_s=_one("step_s", "s", given.step_s, "--step-seconds", _step(report)),
        checkpoint_bytes=None
        if given.checkpoint_bytes is None and num_bytes is None
        else _one("checkpoint_bytes", "bytes", given.checkpoint_bytes, "--checkpoint-bytes", num_bytes),
        ran=None,
    )
    if inputs.step_s.value <= 0:
        raise CouldNotRunError(f"--step-seconds {inputs.step_s.value:g}: a step must take more than 0 s")
    return replace(inputs, ran=_ran(report)) if any(one.source == MEASURED for one in inputs.times) else inputs


def _ran(report: Report | None) -> Ran | None:
    """Nodes and ranks of the newest launch; a replay has as many ranks on its hosts as it was told to."""
    if report is None:
        return None
    if report.replayed is not None:
        return Ran(report.replayed.hosts, None) if report.replayed.hosts else None
    newest = report.cycles[-1]
    return Ran(len(newest.hosts), newest.expected) if newest.hosts else None


def _refuse_share(report: Report | None, given: Given) -> None:
    """Raises CouldNotRunError if times of saves would be taken from a replay of a share of a rank's bytes."""
    replayed = report.replayed if report else None
    if report is None or replayed is None or replayed.share >= 1:
        return
    if given.blocked_s is None or given.durable_s is None:
        raise CouldNotRunError(
            f"{report.directory}: its saves are of {100 * replayed.share:.3g} % of a rank's bytes (--limit-bytes), and "
            "no save of a training; replay with --limit-bytes none, or give --blocked-seconds and --durable-seconds"
        )


def _one(name: str, unit: str, given: float | None, flag: str, measured: tuple[float, str] | None) -> Input:
    if given is not None:
        if not (math.isfinite(given) and given >= 0):
            raise CouldNotRunError(f"{flag} {given}: give a number of 0 or more")
        return Input(name, given, unit, GIVEN, flag)
    if measured is None:
        raise CouldNotRunError(f"{name} was not recorded: give it with {flag}")
    return Input(name, measured[0], unit, MEASURED, measured[1])


def _median_of_saves(report: Report | None, name: str, remark: str) -> tuple[float, str] | None:
    """Median over the complete saves of what is called `name`."""
    saves = report.complete_saves if report else []
    values = [value for save in saves if (value := getattr(save, name)) is not None]
    label = report.replayed.label if report and report.replayed else None
    note = f"median of {len(values)} saves ({remark}{f'; {label}' if label else ''})"
    return (median(values), note) if values else None


def tier_of(report: Report, start: StartStats) -> str | None:
    """The farthest tier that a rank read from in this start; None if its load names none."""
    loads = [load for load in report.loads if load.cycle == start.cycle and load.outcome == "ok"]
    tiers = {tier.tier for load in loads for tier in load.tiers}
    return next((tier for tier in reversed(NEAREST_FIRST) if tier in tiers), None)


def _durable(report: Report | None, tier: str | None) -> tuple[float, str] | None:
    if report is not None and tier not in (None, STORAGE):
        # A save in memory counts once all ranks have agreed on it, which ends the operation.
        took = [save.wall.max_s for save in report.complete_saves if save.wall]
        return (median(took), f"median of {len(took)} saves (until all ranks agreed on it in memory)") if took else None
    not_durable = "committed_s: committed, but not synchronised to storage"
    durable = _median_of_saves(report, "durable_s", "durable_s")
    return durable or _median_of_saves(report, "committed_s", not_durable)


def _restart(report: Report | None, given: Given) -> tuple[float, str] | None:
    """Raises CouldNotRunError if restarts read from several tiers, and none was chosen."""
    restarts = report.restarts if report else []
    source = ""
    if report is not None and given.restart_s is None:
        restarts = restarts_of_tier(report, restarts, given.tier)
        source = f" from {given.tier}" if given.tier else ""
    whole = [start.restart_s for start in restarts if start.restart_s is not None]
    if whole:
        return median(whole), f"median of {len(whole)} restarts{source} (restart_s, failure to first step)"
    starts = [start.wall.max_s for start in restarts if start.wall]
    if starts:
        note = "time_to_first_step_s: to notice the failure and to launch again is not in it"
        return median(starts), f"median of {len(starts)} restarts{source} ({note})"
    return None


def restarts_of_tier(report: Report, restarts: Sequence[StartStats], tier: str | None) -> list[StartStats]:
    """Those of `restarts` that read from `tier`; with None all, if they read from one.

    Raises CouldNotRunError if they read from several, or none from `tier`.
    """
    tiers = {start.cycle: tier_of(report, start) for start in restarts}
    there = [one for one in NEAREST_FIRST if one in tiers.values()]
    if tier is None:
        if len(there) > 1:
            raise CouldNotRunError(
                f"--tier is missing: restarts of this run read from {', '.join(there)}, which take different times; "
                "name one, or give --restart-seconds"
            )
        return list(restarts)
    if tier not in there:
        known = f"its restarts read from {', '.join(there)}" if there else "no restart of it says where it read"
        raise CouldNotRunError(f"--tier {tier}: {known}; name one that there is, or give --restart-seconds")
    return [start for start in restarts if tiers[start.cycle] == tier]


def _step(report: Report | None) -> tuple[float, str] | None:
    steps = [step.seconds for step in report.steps] if report else []
    if report is None or not steps:
        return None
    waits = report.imported is not None and any(save.wait for save in report.imported.saves)
    note = "; those that waited for a save's files count with the wait" if waits else ""
    return median(steps), f"median of {len(steps)} steps (slowest rank{note})"


def _bytes(report: Report | None) -> tuple[float, str] | None:
    if report and report.replayed and report.replayed.label:  # a part of a checkpoint
        return None
    sizes = [save.bytes for save in report.complete_saves if save.bytes] if report else []
    return (median(sizes), f"median of {len(sizes)} saves") if sizes else None
