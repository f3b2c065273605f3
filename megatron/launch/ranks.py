"""The ranks of one start on this node: forked, watched, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from megatron.config.arguments import EXIT_CODE as REFUSED
from megatron.config.errors import REPEATED
from megatron.launch.plan import Plan
from megatron.launch.rank import become_rank, rank_environment
from megatron.processes.in_process_restart import RETURN, RETURNED, send_start
from restart_trace.startup import PRELOAD_VARIABLE, Preload

_KILLED_AGAIN_S = 1.0  # at least: an end takes a while


@dataclass
class Ranks:
    """The ranks of one start: those that run (pid -> rank), and why others failed, in the order of their failures."""

    running: dict[int, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    # Exit code of a rank that refused to start: 2, its input; 65, as the starts before ended with one error; 0: none.
    refused: int = 0
    ended_by: int | None = None  # the first signal by which they are being ended
    deadline: float | None = None  # when those that run get SIGKILL (monotonic, s); None: they are not being ended
    # With --in-process-restart: pid -> the launcher's end of the connection, and those that wait for the next start.
    connections: dict[int, socket.socket] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    returns: dict[int, int] = field(default_factory=dict)  # pid -> how often it has been started again

    @property
    def settled(self) -> bool:
        """Whether nothing is to be waited for before the next start: all ranks have ended, or have returned."""
        return self.running.keys() <= self.returned

    def ask_back(self, timeout_s: float, most: int) -> str | None:
        """Have them leave this start and wait for the next, and end by SIGKILL those that have not after `timeout_s`.

        One that is stopped is let run. Those that have been started again `most` times are killed at once; returns
        which they are, and why, or None if there are none.
        """
        worn = {pid: rank for pid, rank in self.running.items() if self.returns.get(pid, 0) >= most}
        for pid in self.running:
            if pid in worn:
                _send_to_group(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # of one that has just ended, as will be seen
                self.connections[pid].send(RETURN)
        self.send(signal.SIGCONT)
        self.deadline = time.monotonic() + timeout_s
        ranks = ", ".join(map(str, sorted(worn.values())))
        return (
            f"killed, since their processes have returned --max-returns {most} times: ranks {ranks}" if worn else None
        )

    def hear(self) -> None:
        """Note which have returned. Kill them if they are being ended: the signal may have come while they left."""
        for pid in self.connections.keys() - self.returned:
            with contextlib.suppress(OSError):  # nothing yet, or it has ended
                if self.connections[pid].recv(len(RETURNED), socket.MSG_DONTWAIT) != RETURNED:
                    continue
                if self.ended_by is None:
                    self.returned.add(pid)
                else:
                    _send_to_group(pid, signal.SIGKILL)

    def which_returned(self) -> set[int]:
        """The ranks that have returned and wait for the next start."""
        self.reap()  # they may have waited for long
        return {self.running[pid] for pid in self.returned}

    def start_again(self, before: Ranks, plan: Plan, restart: int, port: int) -> None:
        """Take over the ranks that have returned from the start before, and have them start as this restart.

        One that cannot be told is killed, so that it is forked anew: the others would wait for it. One that was stopped
        after it had returned is let run.
        """
        launcher = {name: value for name, value in os.environ.items() if name != PRELOAD_VARIABLE}
        for pid in sorted(before.returned):
            own = rank_environment(plan, before.running[pid] - plan.rank(0), restart, port, None)
            try:
                send_start(before.connections[pid], launcher | own)
            except OSError:  # it has just ended, or no file can be opened here
                continue
            self.running[pid] = before.running.pop(pid)
            self.connections[pid] = before.connections.pop(pid)
            self.returns[pid] = before.returns.get(pid, 0) + 1
            _send_to_group(pid, signal.SIGCONT)
        before.returned.clear()
        before.kill_now()

    def send(self, signum: int) -> None:
        """Send a signal to every running rank and the processes that it has started."""
        for pid in self.running:
            _send_to_group(pid, signum)

    def end(self, signum: int, timeout_s: float) -> None:
        """Have them end by a signal, and by SIGKILL when `timeout_s` have passed. One that is stopped is let run.

        Only SIGKILL is sent to ranks that are being ended already: another signal could end one that saves.
        """
        if self.ended_by is not None and signum != signal.SIGKILL:
            return
        self.returned.clear()
        self.send(signum)
        self.send(signal.SIGCONT)
        if self.ended_by is None:
            self.ended_by = signum
            self.deadline = time.monotonic() + timeout_s

    def kill_overdue(self, timeout_s: float) -> str | None:
        """SIGKILL to those that should have ended, or returned, by now; again after `timeout_s`, at least a second.

        Returns which they are, and why; None if there are none.
        """
        late = {pid: rank for pid, rank in self.running.items() if pid not in self.returned}
        if self.deadline is None or time.monotonic() < self.deadline or not late:
            return None
        for pid in late:
            _send_to_group(pid, signal.SIGKILL)
        self.deadline = time.monotonic() + max(timeout_s, _KILLED_AGAIN_S)
        ranks = ", ".join(str(rank) for rank in sorted(late.values()))
        if self.ended_by is None:
            return f"killed after --return-timeout {timeout_s:g}, since they had not returned: ranks {ranks}"
        name = signal.Signals(self.ended_by).name
        return f"killed after --shutdown-timeout {timeout_s:g}, since they had not ended after {name}: ranks {ranks}"

    def kill_now(self) -> None:
        """SIGKILL to all of them, and wait for their end."""
        self.send(signal.SIGKILL)
        for pid in self.running:
            os.waitpid(pid, 0)
            if pid in self.connections:
                self.connections.pop(pid).close()
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
            self.returned.discard(pid)
            if pid in self.connections:
                self.connections.pop(pid).close()


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


class Forks:
    """The ranks of one start on this node: forked, or taken over from the start before.

    In a rank `in_child` is called with its local rank, and what forks it does not return: SystemExit leaves through it.
    """

    def __init__(
        self, plan: Plan, restart: int, port: int, preloaded: Preload | None, in_child: Callable[[int], object]
    ) -> None:
        self.ranks = Ranks()
        self._plan = plan
        self._restart = restart
        self._port = port
        self._preloaded = preloaded
        self._in_child = in_child
        self._launcher = os.getpid()

    def fork_lost(self, before: Ranks) -> None:
        """Fork the ranks that have ended of the start `before`, while others still leave it.

        But rank 0: it claims --save, where those may still write.
        """
        self._fork_others({0, *before.running.values()}, before)

    def complete(self, before: Ranks | None) -> None:
        """Have the ranks that have returned from the start `before` start again, and fork those that are missing."""
        returned = set() if before is None else before.which_returned()
        self._fork_others(returned, before)  # they have more to do than those that returned, so they begin first
        if before is not None:
            self.ranks.start_again(before, self._plan, self._restart, self._port)
            self._fork_others(set(), before)

    def _fork_others(self, there: Collection[int], before: Ranks | None) -> None:
        """Fork the ranks that neither are `there` nor were forked or taken over."""
        for local_rank in range(self._plan.nproc_per_node):
            if self._plan.rank(local_rank) not in {*there, *self.ranks.running.values()}:
                self._fork(local_rank, () if before is None else before.connections.values())

    def _fork(self, local_rank: int, of_others: Iterable[socket.socket]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        plan, ranks = self._plan, self.ranks
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET) if plan.in_process_restart else (None, None)
        pid = os.fork()
        if pid == 0:
            for end in (ours, *ranks.connections.values(), *of_others):
                if end is not None:
                    end.close()
            self._in_child(local_rank)
            become_rank(plan, local_rank, self._restart, self._port, self._launcher, self._preloaded, theirs)
        if ours is not None and theirs is not None:
            theirs.close()
            ranks.connections[pid] = ours
        ranks.running[pid] = plan.rank(local_rank)


def _send_to_group(pid: int, signum: int) -> None:
    """To the process group that a rank leads, or to the rank if it has just been forked and leads none yet."""
    try:
        os.killpg(pid, signum)
    except (ProcessLookupError, PermissionError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
