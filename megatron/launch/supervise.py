"""Starts all ranks of the node, watches them, and ends or restarts all of them, as torchrun's agent does.

There is one thread, so that the process stays forkable: it waits for signals, which also report the end of a rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from megatron.launch.plan import Plan
from megatron.launch.rank import become_rank
from megatron.processes.rendezvous_store import RendezvousStore
from restart_trace.startup import Preload

FAILED = 1
COULD_NOT_RUN = 2
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})


@dataclass
class Ranks:
    """The ranks of one start: those that run (pid -> rank), and why others failed, in the order of their failures."""

    running: dict[int, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def send(self, signum: int) -> None:
        """Send a signal to every running rank and the processes that it has started."""
        for pid in self.running:
            _send_to_group(pid, signum)

    def reap(self) -> None:
        """Record the ranks that have ended; the processes that a failed rank had started are killed."""
        for pid, rank in list(self.running.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            exited = ended.si_code == os.CLD_EXITED
            if not exited or ended.si_status:
                _send_to_group(pid, signal.SIGKILL)  # while it is not reaped, the number is no other's
                how = f"exit code {ended.si_status}" if exited else f"ended by {signal.Signals(ended.si_status).name}"
                self.failures.append(f"rank {rank} (pid {pid}): {how}")
            os.waitpid(pid, 0)
            del self.running[pid]


def _send_to_group(pid: int, signum: int) -> None:
    """To the process group that a rank leads, or to the rank if it has just been forked and leads none yet."""
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def supervise(plan: Plan, preloaded: Preload) -> int:
    """Start the ranks, and start them again as often as --max-restarts says when one fails; the exit status."""
    # What is to be ignored (nohup) stays so: once it is blocked and waited for, it would be no more.
    stopping = {signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN}
    watched = frozenset(stopping | {signal.SIGCHLD})
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    for restart in range(plan.max_restarts + 1):
        try:
            store = _store(plan)
        except OSError as error:
            say(
                f"error: --master-port {plan.master_port}: the rendezvous cannot be served there: {error.strerror}; "
                "name a port that is free on this node"
            )
            return COULD_NOT_RUN
        port = store.port if store is not None else plan.master_port or 0
        ranks = _start(plan, restart, port, preloaded if restart == 0 else None, mask)
        stopped_by = _run_to_end(ranks, watched, plan.shutdown_timeout_s)
        if store is not None:
            store.close()
        if stopped_by is not None:
            say(f"{stopped_by.name} was received and passed on to the ranks")
        if not ranks.failures:
            return 0
        if stopped_by is not None:
            return 128 + stopped_by
        say(ranks.failures[0] + ("; the others were stopped" if plan.nproc_per_node > 1 else ""))
        if restart < plan.max_restarts:
            say(f"starting all ranks again: restart {restart + 1} of {plan.max_restarts}")
    return FAILED


def _store(plan: Plan) -> RendezvousStore | None:
    """The rendezvous of one start, which node 0 serves. Raises OSError if the port is taken."""
    return RendezvousStore(plan.master_addr, plan.master_port or 0) if plan.node_rank == 0 else None


def _start(plan: Plan, restart: int, port: int, preloaded: Preload | None, mask: Iterable[int]) -> Ranks:
    """Fork all ranks. In a rank this does not return: SystemExit leaves through it."""
    launcher = os.getpid()
    ranks = Ranks()
    for local_rank in range(plan.nproc_per_node):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            become_rank(plan, local_rank, restart, port, launcher, preloaded)
        ranks.running[pid] = plan.rank(local_rank)
    return ranks


def _run_to_end(ranks: Ranks, watched: frozenset[signal.Signals], shutdown_timeout_s: float) -> signal.Signals | None:
    """Return when no rank runs any more; the signal that ended them, if one did. `watched` are blocked.

    When a rank fails, the others get SIGTERM; those that outlive it by the timeout, SIGKILL.
    """
    stopped_by: signal.Signals | None = None
    deadline: float | None = None
    while True:
        ranks.reap()
        if not ranks.running:
            return stopped_by
        if ranks.failures and deadline is None:
            ranks.send(signal.SIGTERM)
            deadline = time.monotonic() + shutdown_timeout_s
        if deadline is not None and time.monotonic() >= deadline:
            ranks.send(signal.SIGKILL)
            deadline = time.monotonic() + shutdown_timeout_s
        signum = _next_signal(watched, deadline)
        if signum is not None and signum in STOP_SIGNALS:
            stopped_by = stopped_by or signum
            ranks.send(signum)
            deadline = deadline or time.monotonic() + shutdown_timeout_s


def _next_signal(watched: frozenset[signal.Signals], deadline: float | None) -> signal.Signals | None:
    """Wait for a signal, until `deadline` (monotonic, s) at most."""
    if deadline is None:
        return signal.Signals(signal.sigwaitinfo(watched).si_signo)
    found = signal.sigtimedwait(watched, max(0.0, deadline - time.monotonic()))
    return None if found is None else signal.Signals(found.si_signo)


def say(text: str) -> None:
    """Tell the user, apart from the output of the ranks."""
    print(f"[launch] {text}", file=sys.stderr, flush=True)
