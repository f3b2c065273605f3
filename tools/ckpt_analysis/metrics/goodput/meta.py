"""Effective training time ratio as Meta defines it (Kokolis et al. 2024): measured, and expected of such failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import polars as pl

from ...common.problems import number_list
from ...model.frame import Frames
from ..budget import BLOCKED, LAUNCHING, RESTARTING, WASTED, Budget
from ..failures import failed_cycles
from ..results import OperationStats


@dataclass(frozen=True)
class ExpectedRatio:
    """The terms of the expectation, in seconds, and failures per second; see docs/metrics.md."""

    failures_per_s: float
    restart_s: float
    interval_s: float
    write_s: float

    @property
    def ratio(self) -> float:
        """Below 0 where failures come faster than the approximation holds for."""
        lost = self.failures_per_s * (self.restart_s + self.interval_s / 2)
        return (1 - lost) / (1 + self.write_s / self.interval_s)


def productive_s(budget: Budget) -> float:
    """Time of a run without starts, saves that blocked training, and training that was lost."""
    return budget.wall_s - sum(budget.seconds[part] for part in (LAUNCHING, RESTARTING, BLOCKED, WASTED))


def expected_ratio(frames: Frames, budget: Budget, saves: Sequence[OperationStats]) -> ExpectedRatio | str:
    """The expectation from a run's own medians and its rate of failures; or what of that the trace does not tell."""
    failures = _failures(frames, budget)
    if isinstance(failures, str):
        return failures
    starts = frames.operations.group_by("group").agg(pl.col("start_ns").min())
    begun_ns = dict(starts.iter_rows())
    complete = [save for save in saves if save.outcome == "ok" and save.blocked_s is not None]
    between = [
        (begun_ns[after.group] - begun_ns[before.group]) / 1e9 - (before.blocked_s or 0.0)
        for before, after in pairwise(complete)
        if before.cycle == after.cycle
    ]
    if not between or median(between) <= 0:
        return "no cycle has two complete saves, between which an interval would be"
    restarted = [cycle.seconds[RESTARTING] for cycle in budget.cycles if cycle.seconds[RESTARTING] > 0]
    if not restarted:
        return "no cycle is a restart"
    return ExpectedRatio(
        failures_per_s=failures / budget.wall_s,
        restart_s=sum(restarted) / len(restarted),
        interval_s=median(between),
        write_s=median(save.blocked_s or 0.0 for save in complete),
    )


def _failures(frames: Frames, budget: Budget) -> int | str:
    """How many cycles of the budget failed; or why that is no rate.

    A cycle that others follow failed unless it ended well, the last one only if a failure of it is recorded.
    """
    recorded, numbers = failed_cycles(frames.events), [each.cycle for each in budget.cycles]
    outside = [cycle for cycle in recorded if not numbers[0] <= cycle <= numbers[-1]]
    if outside:
        return f"a failure of cycle {number_list(outside)} is recorded, but not how long that cycle took"
    ended_well = {each.cycle for each in budget.cycles if each.ended_well_s is not None}
    failed = ({*numbers[:-1]} | recorded) - ended_well
    return len(failed) or "the trace records no failure, so that their rate is not known"
