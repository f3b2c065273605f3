"""Helper processes of a rank that multiprocessing starts, such as the workers of a data loader.

They live as long as the rank, whatever signals its job gets: a rank that saves at SIGTERM needs them until the last
step is done. So they ignore SIGTERM, by which multiprocessing and torch end them; here these use another signal.
"""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

from megatron.processes.parent_process import become_helper, stop_signals_blocked

# Of the rank alone. The worker ends with code 0: torch takes any other end of a worker for an error of the rank.
_END_SIGNAL = signal.SIGRTMIN + 3
_PATIENCE_S, _PARTS = 5.0, 10


class _Ended(Popen):
    def terminate(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, _END_SIGNAL)  # it is not reaped before, so the number is no other's
            # In parts: one alone may be over as soon as the machine, and the worker with it, has stood still.
            if all(self.wait(_PATIENCE_S / _PARTS) is None for _ in range(_PARTS)):
                os.kill(self.pid, signal.SIGKILL)  # it hangs in a call of the system, such as a read


class _Process(ForkProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Ended(process_obj)


class _Context(ForkContext):
    Process = _Process


class Helpers:
    """Those of this process; their init function must be `in_worker`, and they start within `starting`."""

    def __init__(self) -> None:
        self.context = _Context()
        self._parent = os.getpid()

    def starting(self) -> AbstractContextManager[None]:
        """A context in which stop signals wait, so that a new process gets none before it ignores them."""
        return stop_signals_blocked()

    def in_worker(self, number: int) -> None:
        """In the process, before it works. `number`: which one it is."""
        signal.signal(_END_SIGNAL, lambda *_: os._exit(0))
        become_helper(self._parent)
