"""One strike: wait for the moment, cause the fault, see what comes of it. The same under every supervisor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from restart_trace.clock import now_ns
from restart_trace.supervisor import SupervisorTrace

from .faults import DISK_FULL, HANGS, MAY_FAIL_A_SAVE, commits_needed, inject
from .full_disk import full_disk
from .launch import DrillError, Launch
from .moments import TraceTail, wait_for
from .plan import Intent, Plan, Strike

_POLL_S = 0.005

HasEnded = Callable[[], bool]


@dataclass(frozen=True)
class Struck:
    """What a fault did. `hangs`: nothing has ended, and the supervisor must see to it."""

    iteration: int
    processes: int
    hangs: bool
    failed_save: str | None

    def ended(
        self, cycle: int, intent: Intent, exit_code: int | None, expected_step: int, damaged: Path | None
    ) -> Strike:
        """The strike as it is reported, now that the job has failed; the arguments are fields of Strike."""
        return Strike(
            cycle=cycle,
            fault=intent.fault,
            moment=intent.moment.text,
            iteration=self.iteration,
            processes=self.processes,
            exit_code=exit_code,
            expected_step=expected_step,
            failed_save=self.failed_save,
            damaged=None if damaged is None else str(damaged),
        )


def strike(
    plan: Plan, launch: Launch, trace: SupervisorTrace, cycle: int, intent: Intent, has_ended: HasEnded
) -> Struck:
    """Cause the fault in `cycle` at its moment, and return once the job has failed (or hangs).

    If it is a save that fails, and training goes on, then all ranks are killed, too. Raises DrillError if the moment
    does not come, or the fault has no effect, in time.
    """
    commits = commits_needed(intent.fault, cycle == 0)
    iteration = wait_for(intent.moment, launch, plan.trace_dir, cycle, commits, plan.limit_s)
    if has_ended():
        raise DrillError(
            f"the training ended before {intent.fault} could strike at {intent.moment.text}; let it train longer"
        )
    launch.expect_failure()
    trace.failure("injected", cycle=cycle, detail=intent.fault, iteration=iteration)
    begin = now_ns()
    with contextlib.ExitStack() as stack:
        if intent.fault == DISK_FULL:
            processes, fill = 0, stack.enter_context(full_disk(plan.checkpoints))
        else:
            processes, fill = inject(intent.fault, launch), _nothing
        outcome = _watch(plan, intent.fault, _Course(plan.trace_dir, cycle, begin), has_ended, fill)
        if outcome.failed_save is not None:
            trace.failure("injected", cycle=cycle, detail="sigkill-all", iteration=outcome.iteration)
            launch.look()
            processes += inject("sigkill-all", launch)
    if outcome.failed_save is not None:
        _watch(plan, "sigkill-all", _Course(plan.trace_dir, cycle, now_ns()), has_ended, _nothing)
    return Struck(max(iteration, outcome.iteration), processes, outcome.hangs, outcome.failed_save)


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class _Outcome:
    hangs: bool = False
    failed_save: str | None = None
    iteration: int = 0


class _Course:
    """What rank 0 records after the fault."""

    def __init__(self, trace_dir: Path, cycle: int, since_ns: int) -> None:
        self._tail = TraceTail(trace_dir, cycle)
        self._since_ns = since_ns
        self.iteration = 0
        self.progress = time.monotonic()  # when the last iteration was seen
        self._failed: dict[str, Any] | None = None
        self.went_on_after: str | None = None  # the error of a save that failed while training went on

    def look(self) -> None:
        for record in self._tail.new_records():
            if record["type"] == "iteration":
                self.iteration, self.progress = record["step"], time.monotonic()
                if self._failed is not None and record["end_ns"] > self._failed["end_ns"]:
                    self.went_on_after = self._failed.get("error", "no reason is on record")
            elif (record["type"], record.get("operation")) == ("operation_end", "save"):
                failed = record["outcome"] == "failed" and record["end_ns"] > self._since_ns
                self._failed = record if failed else self._failed


def _watch(
    plan: Plan, fault: str, course: _Course, has_ended: HasEnded, fill: Callable[[], None]
) -> _Outcome:
    """Return when the job has failed, or hangs, or trains on after a save that failed; whichever the fault may do."""
    deadline = time.monotonic() + plan.limit_s
    while not has_ended():
        fill()
        course.look()
        if fault in MAY_FAIL_A_SAVE and course.went_on_after is not None:
            return _Outcome(failed_save=course.went_on_after, iteration=course.iteration)
        if fault in HANGS and time.monotonic() - course.progress > plan.hang_limit_s:
            return _Outcome(hangs=True)
        if time.monotonic() > deadline:
            raise DrillError(
                f"--fault {fault} had no effect within {plan.limit_s:g} s: the job goes on; raise --time-limit"
            )
        time.sleep(_POLL_S)
    if fault == DISK_FULL:
        raise DrillError(
            "--fault disk-full: the training ended before a save had failed and an iteration had followed; let it "
            "train longer, or save more often"
        )
    return _Outcome()
