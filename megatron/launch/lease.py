"""The lease of an agent: a process beside it kills ranks and agent if the agent does not renew the lease in time.

An agent whose beats are not answered kills its ranks, since others may be about to take their place. One that is
stopped (SIGSTOP) or hangs does not, and they would write beside their successors. Then the process here kills the ranks
and the agent; the kernel ends what it did not find (`end_with_parent`).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import time
from pathlib import Path
from typing import NoReturn

from megatron.processes.parent_process import become_helper
from megatron.processes.process_name import name_process

PROCESS_NAME = "lease"  # as ps shows it
_NO_LIMIT = math.inf


class Lease:
    """The process, forked: the caller must have one thread. It ends with the caller."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        parent = os.getpid()
        if os.fork() == 0:
            os.close(self._writer)
            _watch(reader, parent)
        os.close(reader)

    def allow_until(self, deadline: float | None) -> None:
        """Ranks may run until then (monotonic, s), and longer if another call says so; None: there are none."""
        text = f"{_NO_LIMIT if deadline is None else deadline}\n".encode()
        try:
            os.write(self._writer, text)  # less than PIPE_BUF: all of it or nothing
        except OSError:  # it was killed, or is stopped: the agent still sees to its ranks itself
            return

    def close_in_child(self) -> None:
        """In a forked process, which has nothing to tell."""
        os.close(self._writer)


def _watch(reader: int, parent: int) -> NoReturn:
    """In the forked process: kill the parent when its time is up."""
    try:
        become_helper(parent)
        os.setsid()  # the terminal's signals are for the agent to pass on
        name_process(PROCESS_NAME)
        deadline, rest = _NO_LIMIT, b""
        while True:
            # In steps, since a poll takes milliseconds up to a day.
            pause = max(0.0, min(deadline - time.monotonic(), 3600.0))
            if select.select([reader], [], [], pause)[0]:
                got = os.read(reader, 1 << 16)
                if not got:
                    break
                *lines, rest = (rest + got).split(b"\n")
                deadline = float(lines[-1]) if lines else deadline
            elif time.monotonic() >= deadline and os.getppid() == parent:
                _kill_ranks(parent)
                os.kill(parent, signal.SIGKILL)
                break
    finally:
        os._exit(0)  # nothing of the forked agent may run here


def _kill_ranks(agent: int) -> None:
    """Before the agent, whose end tells the coordinator to have others take their place."""
    with contextlib.suppress(OSError):  # a kernel that does not list children
        for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
            if int(child) != os.getpid():
                with contextlib.suppress(ProcessLookupError):  # it leads no group, or has ended
                    os.killpg(int(child), signal.SIGKILL)
