"""The ranks of one start on this node: forked, watched, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.config.arguments import EXIT_CODE as REFUSED
from megatron.config.errors import REPEATED
from megatron.launch.plan import Plan
from megatron.launch.rank import become_rank
from restart_trace.startup import Preload


@dataclass
class Ranks:
    """The ranks of one start: those that run (pid -> rank), and why others failed, in the order of their failures."""

    running: dict[int, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    # Exit code of a rank that refused to start: 2, its input; 65, as the starts before ended with one error; 0: none.
    refused: int = 0
    ended_by: int | None = None  # the first signal by which they are being ended
    deadline: float | None = None  # when those that run get SIGKILL (monotonic, s); None: they are not being ended

    def send(self, signum: int) -> None:
        """Send a signal to every running rank and the processes that it has started."""
        for pid in self.running:
            _send_to_group(pid, signum)

    def end(self, signum: int, timeout_s: float) -> None:
        """Have them end by a signal, and by SIGKILL when `timeout_s` have passed. One that is stopped is let run.

        Only SIGKILL is sent to ranks that are being ended already: another signal could end one that saves.
        """
        if self.deadline is not None and signum != signal.SIGKILL:
            return
        self.send(signum)
        self.send(signal.SIGCONT)
        if self.deadline is None:
            self.ended_by = signum
            self.deadline = time.monotonic() + timeout_s

    def kill_overdue(self, timeout_s: float) -> str | None:
        """SIGKILL to those that should have ended by now; again after `timeout_s`.

        Returns which they are, and why; None if there are none.
        """
        if self.deadline is None or time.monotonic() < self.deadline or not self.running:
            return None
        self.send(signal.SIGKILL)
        self.deadline = time.monotonic() + timeout_s
        ranks = ", ".join(str(rank) for rank in sorted(self.running.values()))
        name = signal.Signals(self.ended_by or signal.SIGKILL).name
        return f"killed after --shutdown-timeout {timeout_s:g}, since they had not ended after {name}: ranks {ranks}"

    def kill_now(self) -> None:
        """SIGKILL to all of them, and wait for their end."""
        self.send(signal.SIGKILL)
        for pid in self.running:
            os.waitpid(pid, 0)
        self.running.clear()

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
                if exited and ended.si_status in (REFUSED, REPEATED):
                    self.refused = max(self.refused, ended.si_status)
                self.failures.append(f"rank {rank} (pid {pid}): {how}")
            os.waitpid(pid, 0)
            del self.running[pid]


class Refusals:
    """Decides after each failed start whether its refusal is final, that is whether another start would be refused too.

    A refusal of the first start means wrong input. Later it is more likely that a host or the storage has changed,
    perhaps only for a moment, so that there is one more start. The same error at the same step is always final. See
    docs/launch.md.
    """

    def __init__(self) -> None:
        self._before = True

    def final(self, refused: int) -> bool:
        """`refused`: as Ranks has it, of the start that has failed."""
        final, self._before = refused == REPEATED or (refused != 0 and self._before), refused != 0
        return final


def fork_ranks(
    plan: Plan, restart: int, port: int, preloaded: Preload | None, in_child: Callable[[int], object]
) -> Ranks:
    """Fork all ranks of this node. In a rank `in_child` is called with its local rank, and this does not return:
    SystemExit leaves through it."""
    launcher = os.getpid()
    ranks = Ranks()
    for local_rank in range(plan.nproc_per_node):
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            in_child(local_rank)
            become_rank(plan, local_rank, restart, port, launcher, preloaded)
        ranks.running[pid] = plan.rank(local_rank)
    return ranks


def _send_to_group(pid: int, signum: int) -> None:
    """To the process group that a rank leads, or to the rank if it has just been forked and leads none yet."""
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
