"""--supervisor torchrun: one launch, whose elastic agent stops and restarts the ranks in place after each strike.

The agent writes no records, so the drill writes what it observes:

    detected    the agent's log line on the failed rank arrived; for a hang, which no agent notices, the drill found
                that no iteration had come for --hang-limit seconds, and killed the rank that hung
    stopped     the last process of the old ranks was gone. The agent starts none before, so if a new one was started
                before the drill had looked, its start is taken, which is the closer bound
    relaunched  the first process of the new ranks was started, by the kernel's own account (10 ms resolution)
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from restart_trace.clock import now_ns, process_start_ns
from restart_trace.supervisor import SupervisorTrace

from .checkpoints import Checkpoints
from .faults import DAMAGE
from .launch import DrillError, Launch
from .plan import Intent, Plan, Strike
from .striking import strike

_POLL_S = 0.002


def strike_in_place(
    plan: Plan, launch: Launch, trace: SupervisorTrace, cycle: int, intent: Intent, checkpoints: Checkpoints
) -> Strike:
    """Strike in `cycle` and see the agent start the ranks of the next one."""

    def has_failed() -> bool:
        return launch.agent_saw_ns is not None or launch.exit_code is not None

    struck = strike(plan, launch, trace, cycle, intent, has_failed)
    if struck.hangs:
        trace.failure("detected", cycle=cycle)
        launch.send(signal.SIGKILL, launch.ranks()[-1:])
        _until(has_failed, plan, "torchrun's agent noticed the failure")
    if launch.agent_saw_ns is None:
        raise _not_restarted(launch, intent.fault)
    if not struck.hangs:
        trace.failure("detected", cycle=cycle, at_ns=launch.agent_saw_ns)
    _until(lambda: not launch.of_attempt(cycle), plan, "the processes of the old ranks were gone")
    gone_ns = now_ns()
    damaged = checkpoints.damage(intent.fault) if intent.fault in DAMAGE else None
    expected = checkpoints.newest_step()
    started_ns = _first_start_ns(plan, launch, cycle + 1, intent.fault)
    trace.failure("stopped", cycle=cycle, at_ns=min(gone_ns, started_ns))
    trace.failure("relaunched", cycle=cycle, at_ns=started_ns)
    launch.has_recovered()
    return struck.ended(cycle, intent, None, expected, damaged)


def _until(condition: Callable[[], bool], plan: Plan, what: str) -> None:
    deadline = time.monotonic() + plan.limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise DrillError(
                f"--supervisor torchrun: {plan.limit_s:g} s passed before {what}; raise --time-limit"
            )
        time.sleep(_POLL_S)


def _first_start_ns(plan: Plan, launch: Launch, attempt: int, fault: str) -> int:
    """When the first process of the ranks of `attempt` was started (monotonic, ns)."""
    deadline = time.monotonic() + plan.limit_s
    while time.monotonic() < deadline:
        starts = [process_start_ns(process.pid) for process in launch.of_attempt(attempt)]
        found = [start for start in starts if start is not None]
        if found:
            return min(found)
        if launch.exit_code is not None:
            raise _not_restarted(launch, fault)
        time.sleep(_POLL_S)
    raise DrillError(
        f"--supervisor torchrun: no rank was restarted within {plan.limit_s:g} s; raise --time-limit"
    )


def _not_restarted(launch: Launch, fault: str) -> DrillError:
    return DrillError(
        f"--supervisor torchrun: after {fault} torchrun ended with exit code {launch.exit_code} and restarted nothing; "
        "see its log"
    )
