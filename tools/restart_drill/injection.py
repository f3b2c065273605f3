"""One injection: wait for the injection point, inject the fault, watch its effect. The same under every supervisor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron.config.uris import ObjectUri
from restart_trace.clock import now_ns

from .faults import DAMAGE, DISK_FULL, HANGS, MAY_FAIL_A_SAVE, SLOWS, commits_needed, inject, proxy_fault
from .full_disk import full_disk
from .injection_points import MID_RETURN, TraceTail, wait_for
from .launch import DrillError
from .plan import PlannedInjection
from .storage_proxy import FaultProxy
from .supervisors import LauncherInPlace, Supervisor

_POLL_S = 0.005
_NO_ERROR = "no error is on record"


@dataclass(frozen=True)
class Effect:
    """The effect of a fault.

    `hangs`: no process has ended, so the supervisor must end them. `then`: training continued, and this second fault is
    to end it.
    """

    iteration: int = 0
    processes: int = 0
    hangs: bool = False
    failed_save: str | None = None
    then: str | None = None


def inject_and_watch(supervisor: Supervisor, cycle: int, planned: PlannedInjection) -> Effect:
    """Inject the fault into `cycle` at its injection point, and return once the job has failed or hangs.

    If training continues, after a failed save or on a slow node, all ranks or one of them are then killed.
    Raises DrillError if the injection point is not reached, or the fault has no effect, in time.
    """
    plan, launch, trace = supervisor.plan, supervisor.launch, supervisor.trace
    # A later save may already be in the slot of the one before the damaged save: then only storage has one left.
    saves_each = plan.saves.until_stored if planned.fault in DAMAGE else plan.saves_until_resumable
    commits = max(planned.commits, commits_needed(planned.fault, cycle == 0, saves_each))
    iteration = wait_for(planned.point, launch, plan.trace_dir, cycle, commits, plan.limit_s)
    launch.await_ranks(plan.trace_dir, cycle, plan.limit_s, supervisor.has_failed)  # during a start-up some are missing
    if supervisor.has_failed():
        raise DrillError(
            f"the training ended before {planned.fault} could be injected at {planned.point.text}; let it train longer"
        )
    launch.of_ranks()  # the children of a rank cannot be found once it is dead
    launch.expect_failure()
    supervisor.prepare(planned.fault)
    since_ns = now_ns()
    with contextlib.ExitStack() as stack:
        processes, fill = 0, _nothing
        if planned.fault == DISK_FULL:  # before the record: filling takes time, in which a save would still find space
            assert not isinstance(plan.checkpoints, ObjectUri)
            fill = stack.enter_context(full_disk(plan.checkpoints))
        trace.failure("injected", cycle=cycle, detail=planned.fault, iteration=iteration)
        watch = _Watch(supervisor, cycle, since_ns)
        if (fault := proxy_fault(planned.fault)) is not None:
            assert supervisor.proxy is not None
            stack.enter_context(_faulty_store(supervisor.proxy, fault))
        elif planned.point.stage == MID_RETURN:
            assert isinstance(supervisor, LauncherInPlace)
            with supervisor.while_ranks_return(lambda: inject("sigkill-one", launch)) as killed:
                return Effect(iteration, killed + inject(planned.fault, launch))
        elif planned.fault != DISK_FULL:
            processes = inject(planned.fault, launch)
        effect = watch.until_failure(planned.fault, fill)
        if effect.then is not None:
            trace.failure("injected", cycle=cycle, detail=effect.then, iteration=effect.iteration)
            processes += inject(effect.then, launch)
    if effect.then is not None:
        _Watch(supervisor, cycle, now_ns()).until_failure(effect.then, _nothing)
    return replace(effect, iteration=max(iteration, effect.iteration), processes=processes)


@contextlib.contextmanager
def _faulty_store(proxy: FaultProxy, fault: str) -> Iterator[None]:
    """Inject `fault` into every request to the store until the context ends."""
    proxy.fault = lambda request: fault
    try:
        yield
    finally:
        proxy.fault = lambda request: None
        proxy.end_delays()


def _nothing() -> None:
    return None


class _Watch:
    """Watches the job after the fault, through the trace of rank 0 and the supervisor."""

    def __init__(self, supervisor: Supervisor, cycle: int, since_ns: int) -> None:
        self._supervisor, self._plan = supervisor, supervisor.plan
        self._tail = TraceTail(self._plan.trace_dir, cycle)
        self._since_ns = since_ns
        self._iteration = 0
        self._progress = time.monotonic()  # when the last iteration was seen
        self._failed: dict[str, Any] | None = None
        self._continued_after: str | None = None  # error of a save that failed while training continued
        self._trained = 0  # iterations that ended since the fault
        self._saved = False  # whether a save was committed since the fault
        self._after_save = 0  # iterations that ended since that save
        self._look()
        self._trained = 0

    def until_failure(self, fault: str, fill: Callable[[], None]) -> Effect:
        """Return when the job has failed, hangs, or continues after a failed save: whichever `fault` may cause."""
        deadline = time.monotonic() + self._plan.limit_s
        while not self._supervisor.has_failed():
            fill()
            self._look()
            if fault in MAY_FAIL_A_SAVE and self._continued_after is not None:
                return Effect(failed_save=self._continued_after, iteration=self._iteration, then="sigkill-all")
            # The first iteration may have been almost done when the fault came. A slow store must have taken a save,
            # and there must be work after it that can be lost.
            trained = self._trained if proxy_fault(fault) is None else self._after_save
            if fault in SLOWS and trained > 1:
                failed = None if self._failed is None else self._failed.get("error", _NO_ERROR)
                return Effect(failed_save=failed, iteration=self._iteration, then="sigkill-one")
            if fault in HANGS and time.monotonic() - self._progress > self._plan.hang_limit_s:
                return Effect(hangs=True)
            if time.monotonic() > deadline:
                raise DrillError(
                    f"--fault {fault} had no effect within {self._plan.limit_s:g} s: the job still runs; raise "
                    "--time-limit"
                )
            time.sleep(_POLL_S)
        if fault == DISK_FULL:
            raise DrillError(
                "--fault disk-full: the training ended before a save had failed and an iteration had followed; let it "
                "train longer, or save more often"
            )
        return Effect()

    def _look(self) -> None:
        for record in self._tail.new_records():
            if record["type"] == "iteration":
                self._iteration, self._progress = record["step"], time.monotonic()
                self._trained += 1
                self._after_save += self._saved
                if self._failed is not None and record["end_ns"] > self._failed["end_ns"]:
                    self._continued_after = self._failed.get("error", _NO_ERROR)
            elif (record["type"], record.get("operation")) == ("operation_end", "save"):
                failed = record["outcome"] == "failed" and record["end_ns"] > self._since_ns
                self._failed = record if failed else self._failed
                self._saved |= record["outcome"] == "ok" and record["end_ns"] > self._since_ns
