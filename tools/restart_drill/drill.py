"""The course of a drill: strike after strike, and the last launch to its end."""

from __future__ import annotations

import signal
from collections.abc import Callable

from restart_trace.supervisor import open_supervisor_trace

from .checkpoints import Checkpoints
from .faults import DISK_FULL
from .full_disk import check_disk
from .in_place import strike_in_place
from .launch import DrillError, Launch, launched
from .moments import wait_for_span
from .plan import TORCHRUN, Plan, Strike
from .relaunch import GRACE_S, launch_and_strike

Say = Callable[[str], None]


def run_drill(plan: Plan, say: Say, done: list[Strike]) -> None:
    """Carry out all strikes of `plan` and train on; what has struck is added to `done` as it happens.

    Raises DrillError, with no process left.
    """
    for directory in (plan.out / "logs", plan.trace_dir, plan.checkpoints):
        directory.mkdir(parents=True, exist_ok=True)
    if any(intent.fault == DISK_FULL for intent in plan.strikes):
        check_disk(plan.checkpoints, plan.trace_dir, plan.disk_limit_bytes)
    checkpoints = Checkpoints(plan.checkpoints)
    if plan.supervisor == TORCHRUN:
        _in_place(plan, checkpoints, say, done)
        return
    for number, intent in enumerate(plan.strikes):
        done.append(launch_and_strike(plan, number, intent, checkpoints))
        say(_told(done[-1]))
    number = len(plan.strikes)
    with launched(plan.command_of(number), plan.log_of(number), plan.echo) as launch:
        _finish(plan, launch, number, number)


def _in_place(plan: Plan, checkpoints: Checkpoints, say: Say, done: list[Strike]) -> None:
    with (
        launched(plan.command, plan.log_of(0), plan.echo) as launch,
        open_supervisor_trace(plan.trace_dir) as trace,
    ):
        for cycle, intent in enumerate(plan.strikes):
            done.append(strike_in_place(plan, launch, trace, cycle, intent, checkpoints))
            say(_told(done[-1]))
        _finish(plan, launch, len(plan.strikes), 0)


def _finish(plan: Plan, launch: Launch, cycle: int, log: int) -> None:
    """Let the launch train to its end, or end it once what was lost has been caught up."""
    if not plan.to_the_end:
        wait_for_span("caught_up", launch, plan.trace_dir, cycle, plan.limit_s)
        launch.expect_failure()
        launch.look()
        launch.kill(Launch.everything)
        launch.wait_until_gone(GRACE_S)
        return
    exit_code = launch.wait(plan.limit_s)
    if exit_code != 0:
        raise DrillError(f"the last launch ended with exit code {exit_code}; see {plan.log_of(log)}")
    launch.wait_until_gone(GRACE_S)


def _told(strike: Strike) -> str:
    """A line on a strike, for people."""
    text = f"cycle {strike.cycle}: {strike.fault} at {strike.moment} struck {strike.processes} processes "
    text += f"after iteration {strike.iteration}; "
    if strike.failed_save is not None:
        text += "a save failed, training went on, and all ranks were killed; "
    if strike.damaged is not None:
        text += f"{strike.damaged} was damaged; "
    if strike.exit_code is None:
        return text + "torchrun restarted the ranks"
    hangs = strike.exit_code == -signal.SIGSTOP
    return text + (
        "it hung and was killed" if hangs else f"the launcher ended with exit code {strike.exit_code}"
    )
