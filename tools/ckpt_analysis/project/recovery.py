"""Effective training time over failure rates, from measured restarts: one curve for each tier of each run.

A curve gives the share of time left for training if every failure ended like the restarts of one run that read from one
tier, with saves to that tier as frequent as in that run. (The GEMINI paper, SOSP 2023, has such curves with computed
recovery times.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from restart_trace.schema import STORAGE

from ..common.errors import CouldNotRunError
from ..metrics.tiers import NEAREST_FIRST
from ..report import Report
from .inputs import GIVEN, MEASURED, Given, Input, Inputs, gather, restarts_of_tier, tier_of
from .model import Costs, outcome

DAY_S = 86400.0


@dataclass(frozen=True)
class Recovery:
    """What the restarts of `run` that read from `tier` took. `tier` is None if its loads name none.

    `restarts_s`: all of them, ascending. `interval_steps`: between two saves that the tier holds.
    """

    run: str
    tier: str | None
    restarts_s: list[float]
    inputs: Inputs
    interval_steps: Input

    @property
    def name(self) -> str:
        return f"{self.tier or STORAGE} of {self.run}"


@dataclass(frozen=True)
class Point:
    """One point of a curve: `goodput` with the median restart, and with the slowest and the fastest one."""

    run: str
    tier: str | None
    failures_per_day: float
    interval_steps: float
    restart_s: float
    goodput: float
    goodput_slowest: float
    goodput_fastest: float
    lost_work_s: float


@dataclass(frozen=True)
class Curves:
    """`kind` is always "projection". The points of a recovery follow each other, by failure rate as given."""

    kind: str
    recoveries: list[Recovery]
    failures_per_day: list[float]
    points: list[Point]
    assumptions: list[str]


ASSUMPTIONS = [
    "failures of the job are independent and exponential, and a restart that fails begins again",
    "every failure ends in a restart from the tier of its curve; `--placement` says how often copies in memory are "
    "lost with the hosts that hold them",
    "restarts and saves take the measured times of the run, whatever the failure rate; lost work follows from the rate "
    "and the interval",
]


def curves(reports: Sequence[Report], given: Given, rates: list[float], interval_steps: int | None) -> Curves:
    """A curve for each tier that restarts of each run read from, or for `given.tier` alone.

    `rates`: failures of the whole job a day. `interval_steps`: None for that of the run. Raises CouldNotRunError
    naming the run, or the flag, for what is neither measured nor given.
    """
    recoveries = [
        recovery
        for report in reports
        for tier in _tiers(report, given.tier)
        for recovery in [_recovery(report, replace(given, tier=tier), interval_steps)]
    ]
    if not recoveries:
        raise CouldNotRunError(f"--tier {given.tier}: no restart of these runs read from there")
    points = [_point(recovery, rate) for recovery in recoveries for rate in rates]
    return Curves("projection", recoveries, rates, points, ASSUMPTIONS)


def _tiers(report: Report, wanted: str | None) -> list[str | None]:
    found = {tier_of(report, start) for start in report.restarts if start.restart_s is not None}
    if not found:
        raise CouldNotRunError(
            f"{report.directory}: has no restart of which the failure was recorded: give a run of restart-launch or "
            "restart-drill, or of torchrun within `restart-trace run`"
        )
    known = [tier for tier in NEAREST_FIRST if tier in found]
    if wanted is None:
        return [*known] or [None]
    return [wanted] if wanted in known else []


def _recovery(report: Report, given: Given, interval_steps: int | None) -> Recovery:
    inputs = gather(report, given)
    restarts = restarts_of_tier(report, report.restarts, given.tier)
    times = sorted(start.restart_s for start in restarts if start.restart_s is not None)
    if interval_steps is not None:
        interval = Input("interval_steps", interval_steps, "steps", GIVEN, "--interval-steps")
    else:
        interval = _interval(report, given.tier)
    return Recovery(str(report.directory), given.tier, times, inputs, interval)


def _interval(report: Report, tier: str | None) -> Input:
    """Steps between two saves of the run: with `tier` storage, or none, between those that were committed there."""
    saves = report.complete_saves
    if tier in (None, STORAGE):
        saves = [save for save in saves if save.committed_s is not None]
    steps = sorted({(save.cycle, save.step) for save in saves if save.step is not None})
    apart = [after[1] - before[1] for before, after in pairwise(steps) if before[0] == after[0]]
    if not apart:
        raise CouldNotRunError(
            f"{report.directory}: has no two saves in a row that {tier or STORAGE} holds: give --interval-steps"
        )
    return Input("interval_steps", median(apart), "steps", MEASURED, f"median between {len(steps)} saves")


def _point(recovery: Recovery, rate: float) -> Point:
    inputs = recovery.inputs
    work_s = recovery.interval_steps.value * inputs.step_s.value

    def at(restart_s: float) -> tuple[float, float]:
        found = outcome(Costs(inputs.blocked_s.value, inputs.durable_s.value, restart_s), DAY_S / rate, work_s)
        return found.goodput, found.lost_work_s

    goodput, lost_work_s = at(inputs.restart_s.value)
    return Point(
        run=recovery.run,
        tier=recovery.tier,
        failures_per_day=rate,
        interval_steps=recovery.interval_steps.value,
        restart_s=inputs.restart_s.value,
        goodput=goodput,
        goodput_slowest=at(recovery.restarts_s[-1])[0],
        goodput_fastest=at(recovery.restarts_s[0])[0],
        lost_work_s=lost_work_s,
    )
