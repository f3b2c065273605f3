"""The process that holds copies of saves, as the launcher's agent starts it, sees its end and starts it again.

The agent keeps the socket on which it listens, so that its port stays the same.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from megatron.peers.client import VARIABLE
from megatron.peers.holder import run
from megatron.peers.traffic import share_step_times, step_times
from megatron.processes.memory_slots import held_slots
from megatron.processes.parent_process import end_with_parent
from megatron.processes.rendezvous_store import listen_on
from restart_trace.cycles import LAUNCH_ID_VARIABLE

PROCESS_NAME = "memory-copies"  # as ps shows it
_PR_SET_NAME = 15  # linux/prctl.h


class CopyProcess:
    """That process of this host. The caller has one thread, since it forks, and holds the slots of the ranks.

    `address`: where other hosts reach this one. Raises OSError if nothing can be listened on.
    """

    def __init__(self, address: str) -> None:
        self._listening = listen_on(address, 0)
        self.started = False
        self.step_times_file = share_step_times(len(held_slots() or []))
        self._pid: int | None = None  # while it runs
        os.environ[VARIABLE] = f"{address}:{self._listening.getsockname()[1]}"

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

    def close_in_child(self) -> None:
        """In a process that the agent has forked for something else."""
        self._listening.close()

    def close(self) -> None:
        """End the process, and with it the copies."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGKILL)  # it is not reaped before, so the number is no other's
            os.waitpid(self._pid, 0)
        self._listening.close()
        os.close(self.step_times_file)

    def _serve(self, parent: int, in_child: Callable[[], object]) -> NoReturn:
        try:
            end_with_parent(parent)
            in_child()
            os.setsid()  # the terminal's signals are for the launcher to pass on
            ctypes.CDLL(None).prctl(_PR_SET_NAME, PROCESS_NAME.encode())
            own = [slot for mine in held_slots() or [] for slot in mine]
            run(self._listening, own, step_times(self.step_times_file), os.environ.get(LAUNCH_ID_VARIABLE, ""))
        finally:
            os._exit(1)  # nothing of the forked launcher may run here
