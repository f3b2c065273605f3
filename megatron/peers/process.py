"""The process that holds copies of saves, as the launcher's agent starts it, sees its end and starts it again.

The agent keeps the socket on which it listens, so that its port stays the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron.net.listening import listen_for_hosts
from megatron.peers.client import MEMBERS_VARIABLE, VARIABLE, Peer, ask, own_peer, tell, tell_of_waiting
from megatron.peers.holder import run
from megatron.peers.memory_slots import held_slots
from megatron.peers.traffic import share_step_times, step_times
from megatron.peers.wire import PeerError
from megatron.processes.parent_process import become_helper
from megatron.processes.process_name import name_process
from restart_trace.cycles import LAUNCH_ID_VARIABLE

PROCESS_NAME = "memory-copies"  # as ps shows it
_ANSWER_S = 30.0  # to a question of how much memory there is
_TELL_S = 0.1  # the agent that tells has one thread, and must not miss a beat of its heartbeat timeout


class CopyProcess:
    """That process of this host. The caller has one thread, since it forks, and holds the slots of the ranks.

    `address`: where other hosts reach this one; `bind`, `towards`: as of `listen_for_hosts`. Raises OSError if nothing
    can be listened on.
    """

    def __init__(self, address: str, bind: str | None = None, towards: str | None = None) -> None:
        self._listening = listen_for_hosts(address, 0, bind, towards)
        self.started = False
        self.step_times_file = share_step_times(len(held_slots() or []))
        self._pid: int | None = None  # while it runs
        self.port: int = self._listening[0].getsockname()[1]
        os.environ[VARIABLE] = f"{address}:{self.port}"

    def tell_of_waiting(self, others: Sequence[Sequence[Any]]) -> None:
        """Ranks that are forked from now on hear of `others`: (host, address, port) where no rank runs."""
        tell_of_waiting([Peer(str(host), str(address), int(port)) for host, address, port in others])

    def runs(self) -> bool:
        if self._pid is not None and os.waitpid(self._pid, os.WNOHANG)[0] != 0:
            self._pid = None
        return self._pid is not None

    def start(self, in_child: Callable[[], object]) -> None:
        """Start the process, which does not run; in it `in_child` is called first."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._serve(parent, in_child)
        self.started = True

    def tell_members(self, members: Sequence[Sequence[str | int]]) -> None:
        """Before ranks are forked: (host, address, port) of those processes of all hosts that train."""
        os.environ[MEMBERS_VARIABLE] = json.dumps(members)

    def prepare_like(self, members: Sequence[Sequence[str | int]]) -> None:
        """On a spare: have the process take the memory that those processes' hosts have for saves.

        A process that is started again, or is busy for _TELL_S, takes it when it is needed.
        """
        with contextlib.suppress(PeerError):  # it is not there
            tell(self.port, _TELL_S, ask="prepare", like=members)

    def lack_of_memory(self) -> str | None:
        """On a spare: that its memory is too little for what a host which trains has there, as the process says."""
        own = own_peer()
        assert own is not None
        try:
            lack = ask(own, _ANSWER_S, ask="sizes")["lack"]
        except PeerError as error:
            return f"the process that holds copies of saves there: {error}"
        return None if lack is None else str(lack)

    def expect(self, node_rank: int, holders: Sequence[Sequence[str | int]]) -> None:
        """On a spare: have the process fetch what the ranks of that node would load, unless it is busy for _TELL_S.

        `holders`: (host, address, port) of the processes that may have it, those to be asked first in front.
        """
        with contextlib.suppress(PeerError):  # it is not there
            tell(self.port, _TELL_S, ask="expect", node_rank=node_rank, holders=holders)

    def close_in_child(self) -> None:
        """In a process that the agent has forked for something else."""
        self._close_port()

    def close(self) -> None:
        """End the process, and with it the copies."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)  # it is not reaped before, so the number is no other's
            os.waitpid(self._pid, 0)
        self._close_port()
        os.close(self.step_times_file)

    def _close_port(self) -> None:
        for one in self._listening:
            one.close()

    def _serve(self, parent: int, in_child: Callable[[], object]) -> NoReturn:
        try:
            become_helper(parent)
            in_child()
            os.setsid()  # the terminal's signals are for the launcher to pass on
            name_process(PROCESS_NAME)
            own = [slot for mine in held_slots() or [] for slot in mine]
            run(self._listening, own, step_times(self.step_times_file), os.environ.get(LAUNCH_ID_VARIABLE, ""))
        finally:
            os._exit(1)  # nothing of the forked launcher may run here
