"""The course of a drill: strike after strike, and the last launch to its end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from restart_trace.schema import LOCAL_MEMORY, STORAGE

from ..common import page_cache
from .checkpoints import Checkpoints, checkpoints_at
from .faults import DAMAGE, DISK_FULL, STOPPED
from .full_disk import check_disk
from .kept import Kept, Left, newest_left
from .launch import GRACE_S, DrillError, Launch
from .moments import wait_for_span
from .plan import Intent, Plan, Strike
from .striking import strike
from .supervisors import Supervisor, supervisor_of

Say = Callable[[str], None]


def run_drill(plan: Plan, say: Say, done: list[Strike]) -> None:
    """Carry out all strikes of `plan` and train on; what has struck is added to `done` as it happens.

    Raises DrillError, with no process left.
    """
    for directory in (plan.out / "logs", plan.trace_dir):
        directory.mkdir(parents=True, exist_ok=True)
    checkpoints = checkpoints_at(plan.checkpoints)
    checkpoints.make_place()
    if any(intent.fault == DISK_FULL for intent in plan.strikes):
        assert isinstance(plan.checkpoints, Path)
        check_disk(plan.checkpoints, plan.trace_dir, plan.disk_limit_bytes)
    with supervisor_of(plan) as supervisor:
        for cycle, intent in enumerate(plan.strikes):
            done.append(_strike_and_restart(supervisor, cycle, intent, checkpoints))
            say(_told(done[-1]))
        _finish(supervisor, len(plan.strikes))


def _strike_and_restart(supervisor: Supervisor, cycle: int, intent: Intent, checkpoints: Checkpoints) -> Strike:
    """Run a cycle until it is struck and down; the next one is to follow at once: its delay counts."""
    supervisor.start(cycle)
    struck = strike(supervisor, cycle, intent)
    exit_code = supervisor.wait_until_down(cycle, intent.fault, struck.hangs)
    begin = time.monotonic()
    kept = supervisor.kept_saves()
    damaged = _damage(intent.fault, checkpoints, kept) if intent.fault in DAMAGE else None
    left = newest_left(checkpoints, kept)
    cache = _drop_page_cache(checkpoints) if supervisor.plan.cold_cache else page_cache.WARM
    drill_s = time.monotonic() - begin if supervisor.waits else 0.0
    supervisor.let_restart(cycle, intent.fault)
    return Strike(
        cycle=cycle,
        fault=intent.fault,
        moment=intent.moment.text,
        iteration=struck.iteration,
        processes=struck.processes,
        exit_code=exit_code,
        expected_step=left.step,
        expected_tier=left.tier,
        lost_at_most=_lost_at_most(supervisor.plan, left),
        failed_save=struck.failed_save,
        damaged=damaged,
        cache=cache,
        unnamed=supervisor.launch.not_named() if intent.fault == STOPPED else (),
        named_s=supervisor.launch.named_s() if intent.fault == STOPPED else None,
        drill_s=drill_s,
    )


def _damage(fault: str, checkpoints: Checkpoints, kept: Kept | None) -> str:
    """Damage what the ranks would resume from; what a message must name."""
    in_memory = kept is not None and newest_left(checkpoints, kept).tier == LOCAL_MEMORY
    return kept.damage(fault) if kept is not None and in_memory else str(checkpoints.damage(fault))


def _lost_at_most(plan: Plan, left: Left) -> int | None:
    """Finished iterations between one save and the next, where what is left is; None if the command does not tell."""
    if plan.save_interval is None:
        return None
    return plan.save_interval * (plan.saves_until_stored if left.tier == STORAGE else 1)


def _drop_page_cache(checkpoints: Checkpoints) -> str:
    """Drop what the kernel caches, of the whole machine where we may; what was found of the checkpoints then."""
    page_cache.drop_all()
    files = page_cache.files_below(checkpoints.directory)
    found = page_cache.state_of(page_cache.drop(files))
    return found if found == page_cache.COLD else page_cache.WARM


def _finish(supervisor: Supervisor, cycle: int) -> None:
    """Let the last cycle train to its end, or end it once what was lost has been caught up."""
    supervisor.start(cycle)
    plan, launch = supervisor.plan, supervisor.launch
    if not plan.to_the_end:
        wait_for_span("caught_up", launch, plan.trace_dir, cycle, plan.limit_s)
        launch.expect_failure()
        launch.kill(Launch.everything)
        launch.wait_until_gone(GRACE_S)
        return
    exit_code = launch.wait(plan.limit_s)
    if exit_code != 0:
        raise DrillError(f"the last launch ended with exit code {exit_code}; see {launch.log_path}")
    launch.wait_until_gone(GRACE_S)


def _told(strike: Strike) -> str:
    """A line on an injected fault, for people."""
    text = f"cycle {strike.cycle}: {strike.fault} at {strike.moment} injected into {strike.processes} processes "
    text += f"after iteration {strike.iteration}; "
    if strike.failed_save is not None:
        text += "a save failed, training went on, and all ranks were killed; "
    if strike.damaged is not None:
        text += f"{strike.damaged} was damaged; "
    if strike.exit_code is None:
        return text + "the launcher restarted the ranks"
    hangs = strike.exit_code == -signal.SIGSTOP
    return text + ("it hung and was killed" if hangs else f"the launcher ended with exit code {strike.exit_code}")
