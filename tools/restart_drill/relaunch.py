"""--supervisor relaunch: each strike brings the whole job down, and the drill launches it again."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import replace

from restart_trace.supervisor import open_supervisor_trace

from ..common import page_cache
from .checkpoints import Checkpoints
from .faults import DAMAGE, MAY_END_WELL
from .launch import DrillError, Launch, launched
from .plan import Intent, Plan, Strike
from .striking import Struck, strike

GRACE_S = 20.0  # for what a launcher leaves behind, such as resource trackers


def launch_and_strike(plan: Plan, number: int, intent: Intent, checkpoints: Checkpoints) -> Strike:
    """Launch, strike, see all processes end. The next launch is to follow at once: its delay counts."""
    with contextlib.ExitStack() as stack:
        launch = stack.enter_context(launched(plan.command_of(number), plan.log_of(number), plan.echo))
        trace = stack.enter_context(open_supervisor_trace(plan.trace_dir))
        struck = strike(plan, launch, trace, number, intent, lambda: launch.exit_code is not None)
        trace.failure("detected", cycle=number)
        exit_code = _end(launch, struck, intent.fault)
        launch.wait_until_gone(GRACE_S)
        trace.failure("stopped", cycle=number)
        begin = time.monotonic()
        damaged = checkpoints.damage(intent.fault) if intent.fault in DAMAGE else None
        expected = checkpoints.newest_step()
        cache = _drop_page_cache(checkpoints) if plan.cold_cache else page_cache.WARM
        drill_s = time.monotonic() - begin
        trace.failure("relaunched", cycle=number)
    return replace(struck.ended(number, intent, exit_code, expected, damaged), cache=cache, drill_s=drill_s)


def _end(launch: Launch, struck: Struck, fault: str) -> int:
    """Exit code of the launcher, which has ended; -SIGSTOP for a hang, which is ended here."""
    if struck.hangs:
        launch.look()
        launch.kill(Launch.everything)
        return -int(signal.SIGSTOP)
    exit_code = launch.wait(GRACE_S)
    if exit_code == 0 and fault not in MAY_END_WELL:
        raise DrillError(f"--fault {fault}: the launcher ended with exit code 0 all the same")
    return exit_code


def _drop_page_cache(checkpoints: Checkpoints) -> str:
    """Drop what the kernel caches, of the whole machine where we may; what was found of the checkpoints then."""
    page_cache.drop_all()
    files = page_cache.files_below(checkpoints.directory)
    found = page_cache.state_of(page_cache.drop(files))
    return found if found == page_cache.COLD else page_cache.WARM
