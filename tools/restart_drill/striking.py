"""One strike: wait for the moment, cause the fault, see what comes of it. The same under every supervisor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from restart_trace.clock import now_ns

from .faults import DAMAGE, DISK_FULL, HANGS, MAY_FAIL_A_SAVE, SLOWS, commits_needed, inject, of_storage
from .full_disk import full_disk
from .launch import DrillError
from .moments import TraceTail, wait_for
from .plan import Intent
from .storage_proxy import FaultProxy
from .supervisors import Supervisor

_POLL_S = 0.005


@dataclass(frozen=True)
class Struck:
    """What a fault did. `hangs`: nothing has ended, and the supervisor must see to it. `then`: training went on, and
    this fault is to end it."""

    iteration: int = 0
    processes: int = 0
    hangs: bool = False
    failed_save: str | None = None
    then: str | None = None


def strike(supervisor: Supervisor, cycle: int, intent: Intent) -> Struck:
    """Cause the fault in `cycle` at its moment, and return once the job has failed (or hangs).

    If training goes on, after a save that failed or on a node that is slow, then all ranks, or one, are killed, too.
    Raises DrillError if the moment does not come, or the fault has no effect, in time.
    """
    plan, launch, trace = supervisor.plan, supervisor.launch, supervisor.trace
    # The next save may already be in the slot of the one before the damaged one: then only storage is left.
    saves_each = plan.saves_until_stored if intent.fault in DAMAGE else plan.saves_until_left
    commits = commits_needed(intent.fault, cycle == 0, saves_each)
    iteration = wait_for(intent.moment, launch, plan.trace_dir, cycle, commits, plan.limit_s)
    launch.await_ranks(plan.trace_dir, cycle, plan.limit_s, supervisor.has_failed)  # in a start they come one by one
    if supervisor.has_failed():
        raise DrillError(
            f"the training ended before {intent.fault} could be injected at {intent.moment.text}; let it train longer"
        )
    launch.of_ranks()  # what a rank has started cannot be found by it once it is dead
    launch.expect_failure()
    supervisor.prepare(intent.fault)
    since_ns = now_ns()
    with contextlib.ExitStack() as stack:
        processes, fill = 0, _nothing
        if intent.fault == DISK_FULL:  # before it is on record: filling takes time, in which saves would find room
            assert isinstance(plan.checkpoints, Path)
            fill = stack.enter_context(full_disk(plan.checkpoints))
        trace.failure("injected", cycle=cycle, detail=intent.fault, iteration=iteration)
        watch = _Watch(supervisor, cycle, since_ns)
        if (what := of_storage(intent.fault)) is not None:
            assert supervisor.proxy is not None
            stack.enter_context(_store_struck(supervisor.proxy, what))
        elif intent.fault != DISK_FULL:
            processes = inject(intent.fault, launch)
        outcome = watch.until_failure(intent.fault, fill)
        if outcome.then is not None:
            trace.failure("injected", cycle=cycle, detail=outcome.then, iteration=outcome.iteration)
            processes += inject(outcome.then, launch)
    if outcome.then is not None:
        _Watch(supervisor, cycle, now_ns()).until_failure(outcome.then, _nothing)
    return replace(outcome, iteration=max(iteration, outcome.iteration), processes=processes)


@contextlib.contextmanager
def _store_struck(proxy: FaultProxy, what: str) -> Iterator[Callable[[], None]]:
    """Let `what` befall every request to the store; at the end the store is as before."""
    proxy.fault = lambda request: what
    try:
        yield _nothing
    finally:
        proxy.fault = lambda request: None
        proxy.let_go()


def _nothing() -> None:
    return None


class _Watch:
    """Sees what becomes of the job after the fault: what rank 0 records, and what the supervisor knows."""

    def __init__(self, supervisor: Supervisor, cycle: int, since_ns: int) -> None:
        self._supervisor, self._plan = supervisor, supervisor.plan
        self._tail = TraceTail(self._plan.trace_dir, cycle)
        self._since_ns = since_ns
        self._iteration = 0
        self._progress = time.monotonic()  # when the last iteration was seen
        self._failed: dict[str, Any] | None = None
        self._went_on_after: str | None = None  # the error of a save that failed while training went on
        self._trained = 0  # iterations that ended since the fault
        self._saved = False  # whether a save was committed since then
        self._after_save = 0  # iterations that ended since that
        self._look()
        self._trained = 0

    def until_failure(self, fault: str, fill: Callable[[], None]) -> Struck:
        """Return when the job has failed, hangs, or trains on after a save that failed; whichever the fault may do."""
        deadline = time.monotonic() + self._plan.limit_s
        while not self._supervisor.has_failed():
            fill()
            self._look()
            if fault in MAY_FAIL_A_SAVE and self._went_on_after is not None:
                return Struck(failed_save=self._went_on_after, iteration=self._iteration, then="sigkill-all")
            # The first may have been all but done. A slow store is to have taken a save, and work to be lost after it.
            trained = self._trained if of_storage(fault) is None else self._after_save
            if fault in SLOWS and trained > 1:
                return Struck(iteration=self._iteration, then="sigkill-one")
            if fault in HANGS and time.monotonic() - self._progress > self._plan.hang_limit_s:
                return Struck(hangs=True)
            if time.monotonic() > deadline:
                raise DrillError(
                    f"--fault {fault} had no effect within {self._plan.limit_s:g} s: the job goes on; raise "
                    "--time-limit"
                )
            time.sleep(_POLL_S)
        if fault == DISK_FULL:
            raise DrillError(
                "--fault disk-full: the training ended before a save had failed and an iteration had followed; let it "
                "train longer, or save more often"
            )
        return Struck()

    def _look(self) -> None:
        for record in self._tail.new_records():
            if record["type"] == "iteration":
                self._iteration, self._progress = record["step"], time.monotonic()
                self._trained += 1
                self._after_save += self._saved
                if self._failed is not None and record["end_ns"] > self._failed["end_ns"]:
                    self._went_on_after = self._failed.get("error", "no reason is on record")
            elif (record["type"], record.get("operation")) == ("operation_end", "save"):
                failed = record["outcome"] == "failed" and record["end_ns"] > self._since_ns
                self._failed = record if failed else self._failed
                self._saved |= record["outcome"] == "ok" and record["end_ns"] > self._since_ns
