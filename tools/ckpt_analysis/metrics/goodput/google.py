"""Goodput and badput as Google's package ml-goodput-measurement computes them (0.2.3, GoodputCalculator).

Written from what the package does, and compared with it on the same events by a test; that includes what surprises:
docs/metrics.md lists it. Where a rule looks arbitrary, it is the package's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

SAVE, RESTORE = "unproductive_checkpoint_save_time", "unproductive_checkpoint_restore_time"
WASTED, RECOVERY = "wasted_progress_from_disruption", "infrastructure_recovery_from_disruption"
SYNC, ASYNC = "data_loading_sync", "data_loading_async"
INIT, PREPARATION, STARTUP, OTHER = "tpu_initialization", "training_prep", "program_startup", "other"
# The types of badput that a job's events can have, by the names of the package.
BADPUT = (INIT, PREPARATION, STARTUP, SYNC, ASYNC, SAVE, RESTORE, WASTED, RECOVERY, OTHER)

Durations = Sequence[tuple[int | None, float]]  # (step of the checkpoint, seconds)


@dataclass(frozen=True)
class JobCycle:
    """What one process records in one launch, in seconds; moments are since any origin that is the same for all.

    `ended_s`: the job ended by itself. `data_s`: the data loading of the start. `steps`: (step, its start).
    """

    started_s: float
    ended_s: float | None = None
    init_s: float = 0.0
    preparation_s: float = 0.0
    data_s: float | None = None
    steps: Sequence[tuple[int, float]] = ()
    saves: Durations = ()
    restores: Durations = ()


@dataclass(frozen=True)
class GoogleGoodput:
    """Seconds. `badput_s` has each of BADPUT. `disruptions`: how often a step was begun again."""

    total_s: float
    productive_s: float
    badput_s: dict[str, float]
    disruptions: int


@dataclass
class _Totals:
    productive_s: float = 0.0
    badput_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BADPUT, 0.0))
    disruptions: int = 0

    def add(self, kind: str, seconds: float) -> None:
        self.badput_s[kind] += seconds


def google_goodput(cycles: Sequence[JobCycle], queried_s: float) -> GoogleGoodput:
    """Goodput of a job, from the events of its launches, in order.

    `queried_s`: until when a job lasts that has no end. Raises ValueError where the package does: without any time, and
    where the productive time is negative or more than all time.
    """
    totals = _Totals()
    last = _walk(cycles, totals)
    ended_s = next((cycle.ended_s for cycle in reversed(cycles) if cycle.ended_s is not None), None)
    total_s = (queried_s if ended_s is None else ended_s) - cycles[0].started_s if cycles else 0.0
    saved_s = _checkpoints(save for cycle in cycles for save in cycle.saves)
    totals.add(SAVE, saved_s)
    totals.add(RESTORE, _checkpoints(restore for cycle in cycles for restore in cycle.restores))
    if last:
        newest = max(last)
        _close(last, newest, totals)
        if ended_s is not None:
            totals.productive_s += ended_s - last[newest]
        totals.productive_s -= saved_s
    if total_s == 0 or not 0 <= totals.productive_s <= total_s:
        raise ValueError(f"{totals.productive_s:.3f} s productive of {total_s:.3f} s in all are no goodput")
    badput_s = {kind: spent if 0 <= spent <= total_s else 0.0 for kind, spent in totals.badput_s.items()}
    known_s = sum(spent for kind, spent in badput_s.items() if kind not in (ASYNC, OTHER))
    badput_s[OTHER] = max(0.0, total_s - totals.productive_s - known_s)
    return GoogleGoodput(total_s, totals.productive_s, badput_s, totals.disruptions)


def _walk(cycles: Sequence[JobCycle], totals: _Totals) -> dict[int, float]:
    """Add up all events but those of the steps since the last disruption: step -> start, which it returns."""
    steps: dict[int, float] = {}
    loading_s: float | None = None  # the newest loading, until a disruption counts it
    counts_next = True  # the next loading holds training up
    all_loading_s = 0.0
    for cycle in cycles:
        totals.add(INIT, cycle.init_s)
        totals.add(PREPARATION, cycle.preparation_s)
        if cycle.data_s is not None:
            loading_s, all_loading_s = cycle.data_s, all_loading_s + cycle.data_s
            if counts_next:
                totals.add(SYNC, cycle.data_s)
            counts_next = False
        for step, start_s in cycle.steps:
            if step in steps:  # the job goes on from a checkpoint before it
                _disrupt(steps, step, cycle.started_s, totals)
                totals.add(SYNC, loading_s or 0.0)
                loading_s, counts_next = None, True
                steps = {}
            steps[step] = start_s
    totals.add(ASYNC, all_loading_s - totals.badput_s[SYNC])
    return steps


def _disrupt(steps: dict[int, float], resumed: int, started_s: float, totals: _Totals) -> None:
    totals.disruptions += 1
    _close(steps, resumed, totals)
    *_, last_s = steps.values()
    totals.add(RECOVERY, max(0.0, started_s - last_s))


def _close(steps: dict[int, float], reached: int, totals: _Totals) -> None:
    """Count steps that follow one another up to the begin of step `reached`; what comes after it was wasted.

    By how much the first of them took longer than the others on average is the program's startup.
    """
    if reached == 0:
        return
    first_s, others, first = 0.0, [], min(steps)
    for (before, before_s), (step, start_s) in pairwise(steps.items()):
        if step > reached:
            totals.add(WASTED, start_s - before_s)
        elif step == before + 1:
            if before == first:
                first_s = start_s - before_s
            else:
                others.append(start_s - before_s)
    extra_s = max(0.0, first_s - sum(others) / len(others)) if others else 0.0
    totals.add(STARTUP, extra_s)
    totals.productive_s += first_s + sum(others) - extra_s


def _checkpoints(durations: Iterable[tuple[int | None, float]]) -> float:
    """Seconds over all steps; several saves or loads of one step, as of several processes, count as their mean."""
    of_step: dict[int | None, list[float]] = {}
    for step, seconds in durations:
        of_step.setdefault(step, []).append(seconds)
    return sum((sum(each) / len(each) for each in of_step.values()), 0.0)
