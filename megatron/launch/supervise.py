"""Starts all ranks of the node, watches them, and ends or restarts all of them, as torchrun's agent does.

There is one thread, so that the process stays forkable: it waits for signals, which also report the end of a rank.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Collection, Iterable, Sequence

from megatron.launch.failure_trace import FailureTrace
from megatron.launch.plan import Plan
from megatron.launch.ranks import Ranks, Refusals
from megatron.launch.start import RendezvousError, Standby, Start
from megatron.peers.memory_slots import hold_slots
from megatron.processes.in_process_restart import REPORT_SIGNAL
from megatron.processes.standby import ASK_SIGNAL
from megatron.processes.telling import tell
from restart_trace.clock import now_ns
from restart_trace.cycles import LAUNCH_ID_VARIABLE
from restart_trace.startup import Preload

FAILED = 1
COULD_NOT_RUN = 2
_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


def stop_signals(arguments: Sequence[str]) -> frozenset[signal.Signals]:
    """The signals that are passed on to the ranks and end the launch, SIGUSR1 and SIGUSR2 if --exit-signal names them.

    `arguments`: of the script. As a name is looked for alone, every spelling of the flag counts.
    """
    words = {word.rpartition("=")[2] for word in arguments}
    return _STOP_SIGNALS | {signum for signum in (signal.SIGUSR1, signal.SIGUSR2) if signum.name in words}


def why_not_again(refused: int) -> str:
    """Why ranks that refused with this exit code are not started again."""
    return "refused input is not retried" if refused == COULD_NOT_RUN else "a repeated error is not retried"


def supervise(plan: Plan, preloaded: Preload) -> int:
    """Start the ranks, and start them again as often as --max-restarts says when one fails; the exit status."""
    # What is to be ignored (nohup) stays so: once it is blocked and waited for, it would be no more.
    stopping = {signum for signum in stop_signals(plan.arguments) if signal.getsignal(signum) is not signal.SIG_IGN}
    reports = {ASK_SIGNAL} if plan.standby else {REPORT_SIGNAL} if plan.in_process_restart else set()
    watched = frozenset(stopping | {signal.SIGCHLD} | reports)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    if plan.keeps_saves:
        hold_slots(plan.nproc_per_node)
    if plan.nnodes == 1 and (plan.keeps_saves or plan.max_restarts):
        _name_launch()
    # One that restarts nothing leaves it to whoever starts it again to record failures.
    trace = FailureTrace(plan.arguments if plan.max_restarts else ())
    standby = Standby(plan, mask, say)
    refusals = Refusals()
    before: Start | None = None
    following: Start | None = None  # its lost ranks are forked by now
    for restart in range(plan.max_restarts + 1):
        if plan.standby:
            while signal.sigtimedwait({ASK_SIGNAL}, 0) is not None:
                pass  # of ranks that have failed since
        trace.before_restart(restart)
        began_ns = now_ns()
        try:
            start = following or standby.release()
            if before is not None and plan.master_port is not None:
                before.close()  # its port is the one of this start
            if start is None:
                start = Start(plan, restart, preloaded if restart == 0 else None, mask)
            elif following is not None and before is not None:
                start.complete(before.ranks)
            trace.relaunched(began_ns)
            if before is not None:
                before.close()  # waits until a process has ended
            stopped_by, following = _run_to_end(start, watched, plan, trace, standby, mask)
        except RendezvousError as error:
            say(f"error: {error}")
            return COULD_NOT_RUN
        code = _outcome(start.ranks, stopped_by, refusals, restart, plan)
        if code is not None:
            for one in (start, following):  # ranks that have returned, and those that were to join them
                if one is not None:
                    one.ranks.kill_now()
                    one.close()
            standby.discard()
            return code
        stay = _listed(start.ranks.running.values())
        who = f"ranks {stay} again in their processes, the others anew" if stay else "all ranks again"
        say(f"starting {who}: restart {restart + 1} of {plan.max_restarts}")
        before = start
    raise AssertionError("the last start has an outcome")


def _outcome(
    ranks: Ranks, stopped_by: signal.Signals | None, refusals: Refusals, restart: int, plan: Plan
) -> int | None:
    """The exit status after a start, or None if another one follows; tells what went wrong."""
    if stopped_by is not None:
        say(f"{stopped_by.name} was received and passed on to the ranks")
    if not ranks.failures:
        return 0
    if stopped_by is not None:
        return 128 + stopped_by
    final, none_left = refusals.final(ranks.refused), restart == plan.max_restarts
    said = ranks.failures[0] + ("; the others were stopped" if plan.nproc_per_node > 1 and not ranks.running else "")
    say(said + (f"; {why_not_again(ranks.refused)}" if final and not none_left else ""))
    if final or none_left:
        return ranks.refused or FAILED
    return None


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _name_launch() -> None:
    """So that a restart in place is known as one of this launch. Several nodes would not have one name."""
    os.environ.setdefault(LAUNCH_ID_VARIABLE, uuid.uuid4().hex[:12])


def _run_to_end(
    start: Start,
    watched: frozenset[signal.Signals],
    plan: Plan,
    trace: FailureTrace,
    standby: Standby,
    mask: Collection[int],
) -> tuple[signal.Signals | None, Start | None]:
    """Return when no rank of this start runs any more: the signal that ended them, if one did, and the following start
    if its lost ranks were forked while the others returned. `watched` are blocked, `mask` are in the ranks.

    When a rank fails, the others get SIGTERM, or are asked to return where a restart in their processes may follow;
    those that outlive that by the timeout get SIGKILL. Raises RendezvousError.
    """
    ranks = start.ranks
    following: Start | None = None
    may_return = plan.returns_after(start.number)
    stopped_by: signal.Signals | None = None
    failed = False
    while True:
        if may_return:
            ranks.hear()  # before: one that has returned may have ended since
        ranks.reap()
        if ranks.failures and not failed and stopped_by is None:
            failed, at_ns = True, now_ns()
            may_return = may_return and not ranks.refused
            if may_return:
                killed = ranks.ask_back(plan.return_timeout_s, plan.max_returns)
                if killed is not None:
                    say(killed)
            else:
                ranks.end(signal.SIGTERM, plan.shutdown_timeout_s)
            trace.detected(start.number, ranks.failures[0], at_ns)
            if may_return:
                if plan.master_port is not None:
                    start.close()  # its port is the one of the following start
                following = Start(plan, start.number + 1, None, mask, before=ranks)
        if ranks.settled:
            if failed:
                trace.stopped()
            return stopped_by, following
        standby.look_after()
        killed = ranks.kill_overdue(plan.shutdown_timeout_s if ranks.ended_by else plan.return_timeout_s)
        if killed is not None:
            say(killed)
        signum = _next_signal(watched, ranks.deadline)
        if signum == ASK_SIGNAL:
            if not failed and stopped_by is None:
                standby.asked(start.number + 1)
        elif signum is not None and signum not in (signal.SIGCHLD, REPORT_SIGNAL):
            stopped_by = stopped_by or signum
            ranks.end(signum, plan.shutdown_timeout_s)


def _next_signal(watched: frozenset[signal.Signals], deadline: float | None) -> signal.Signals | None:
    """Wait for a signal, until `deadline` (monotonic, s) at most."""
    if deadline is None:
        return signal.Signals(signal.sigwaitinfo(watched).si_signo)
    found = signal.sigtimedwait(watched, max(0.0, deadline - time.monotonic()))
    return None if found is None else signal.Signals(found.si_signo)


def say(text: str) -> None:
    """Tell the user, apart from the output of the ranks."""
    tell(f"[launch] {text}")
