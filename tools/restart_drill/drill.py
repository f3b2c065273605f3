"""A drill: the faults of a schedule are injected into one training, one after the other."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from megatron.config.uris import ObjectUri
from restart_trace.schema import LOCAL_MEMORY, STORAGE

from ..common import page_cache
from .checkpoints import Checkpoints, checkpoints_at
from .faults import DAMAGE, DISK_FULL, STOPPED
from .full_disk import check_disk
from .injection import inject_and_watch
from .injection_points import wait_for_span
from .launch import GRACE_S, DrillError, Launch
from .memory_saves import MemorySaves, ResumeSource, newest_resume_source
from .nodes import LaunchOnNodes
from .plan import Injection, Plan, PlannedInjection, say
from .supervisors import Supervisor, supervisor_of

# Starts each cycle of a supervisor and yields what is to be injected into it, one after the other; in the end it lets
# the last cycle train on, and ends it.
Schedule = Callable[[Supervisor], Generator[PlannedInjection, None, None]]


def run_drill(plan: Plan, schedule: Schedule, done: list[Injection]) -> None:
    """Carry out `schedule`. Each injection is appended to `done` before the schedule is asked for the next one.

    Raises DrillError, with no process left.
    """
    checkpoints = checkpoints_at(plan.checkpoints)
    if not checkpoints.is_empty():
        new = "prefix" if isinstance(plan.checkpoints, ObjectUri) else "directory"
        raise DrillError(f"--checkpoints: {plan.checkpoints} is not empty; give a new {new}")
    for directory in (plan.out / "logs", plan.trace_dir):
        directory.mkdir(parents=True, exist_ok=True)
    checkpoints.create()
    if DISK_FULL in plan.faults:
        assert not isinstance(plan.checkpoints, ObjectUri)
        check_disk(plan.checkpoints, plan.trace_dir, plan.disk_limit_bytes)
    with supervisor_of(plan) as supervisor, closing(schedule(supervisor)) as injections:
        for cycle, planned in enumerate(injections):
            done.append(_inject_and_restart(supervisor, cycle, planned, checkpoints))
            say(_summary(done[-1]))


def in_turn(injections: Sequence[PlannedInjection]) -> Schedule:
    """The schedule of these injections, after which the training is finished."""

    def schedule(supervisor: Supervisor) -> Generator[PlannedInjection, None, None]:
        for cycle, planned in enumerate(injections):
            supervisor.start(cycle)
            yield planned
        _finish(supervisor, len(injections))

    return schedule


def _inject_and_restart(
    supervisor: Supervisor, cycle: int, planned: PlannedInjection, checkpoints: Checkpoints
) -> Injection:
    """Run a cycle that was started until the fault has brought it down, and let the next one start.

    The schedule must call `start` for the next cycle at once, since any delay adds to the restart time.
    """
    effect = inject_and_watch(supervisor, cycle, planned)
    exit_code = supervisor.wait_until_down(cycle, planned.fault, effect.hangs)
    begin = time.monotonic()
    in_memory = supervisor.memory_saves()
    damaged = _damage(planned.fault, checkpoints, in_memory) if planned.fault in DAMAGE else None
    source = newest_resume_source(checkpoints, in_memory)
    cache = _drop_page_cache(checkpoints) if supervisor.plan.cold_cache else page_cache.WARM
    drill_s = time.monotonic() - begin if supervisor.waits else 0.0
    supervisor.let_restart(cycle, planned.fault)
    launch = supervisor.launch
    stopped = launch if planned.fault == STOPPED and isinstance(launch, LaunchOnNodes) else None
    return Injection(
        cycle=cycle,
        fault=planned.fault,
        injection_point=planned.point.text,
        iteration=effect.iteration,
        processes=effect.processes,
        exit_code=exit_code,
        expected_step=source.step,
        expected_tier=source.tier,
        lost_at_most=_lost_at_most(supervisor.plan, source),
        failed_save=effect.failed_save,
        damaged=damaged,
        cache=cache,
        unnamed=() if stopped is None else stopped.not_named(),
        named_s=None if stopped is None else stopped.named_s(),
        drill_s=drill_s,
    )


def _damage(fault: str, checkpoints: Checkpoints, in_memory: MemorySaves | None) -> str:
    """Damage what the ranks would resume from. Returns the name by which a message must report it."""
    if in_memory is not None and newest_resume_source(checkpoints, in_memory).tier == LOCAL_MEMORY:
        return in_memory.damage(fault)
    return str(checkpoints.damage(fault))


def _lost_at_most(plan: Plan, source: ResumeSource) -> int | None:
    """Finished iterations between two saves to the tier of `source`; None if the command does not show it."""
    if plan.saves.interval is None:
        return None
    return plan.saves.interval * (plan.saves.until_stored if source.tier == STORAGE else 1)


def _drop_page_cache(checkpoints: Checkpoints) -> str:
    """Drop the page cache, of the whole machine if permitted. Returns what then remains of the checkpoints' files."""
    page_cache.drop_all()
    files = page_cache.files_below(checkpoints.directory)
    found = page_cache.state_of(page_cache.drop(files))
    return found if found == page_cache.COLD else page_cache.WARM


def _finish(supervisor: Supervisor, cycle: int) -> None:
    """Let the last cycle train to its end, or end it once it has caught up."""
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


def _summary(injection: Injection) -> str:
    """One line for the user about an injected fault."""
    text = (
        f"cycle {injection.cycle}: {injection.fault} at {injection.injection_point} injected into "
        f"{injection.processes} processes after iteration {injection.iteration}; "
    )
    if injection.failed_save is not None:
        text += "a save failed, training continued, and ranks were killed; "
    if injection.damaged is not None:
        text += f"{injection.damaged} was damaged; "
    if injection.exit_code is None:
        return text + "the launcher restarted the ranks"
    hangs = injection.exit_code == -signal.SIGSTOP
    return text + ("it hung and was killed" if hangs else f"the launcher ended with exit code {injection.exit_code}")
