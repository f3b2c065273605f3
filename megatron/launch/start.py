"""One start of all ranks of a node and its rendezvous; that of the next one may be forked ahead of a failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection

from megatron.launch.plan import Plan
from megatron.launch.ranks import fork_ranks
from megatron.processes.process_name import name_process
from megatron.processes.rendezvous_store import RendezvousStore
from megatron.processes.standby import LAUNCHER_VARIABLE, SETS_UP, VARIABLE
from restart_trace.startup import Preload


class Start:
    """Ranks that run, or standby ranks, which set themselves up and wait for `release`."""

    def __init__(
        self, plan: Plan, number: int, preloaded: Preload | None, mask: Collection[int], *, waits: bool = False
    ) -> None:
        """Fork them. `number`: of restarts before it; `mask`: the signals that they have blocked. In a rank this does
        not return, as of fork_ranks. Raises OSError if the port of the rendezvous is taken.
        """
        self.number = number
        self._store = RendezvousStore(plan.master_addr, plan.master_port or 0) if plan.node_rank == 0 else None
        self._release: int | None = None
        port = self._store.port if self._store is not None else plan.master_port or 0
        reader, self._release = os.pipe() if waits else (None, None)
        asks = plan.standby and number < plan.max_restarts

        def in_child() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if asks:
                os.environ[LAUNCHER_VARIABLE] = str(os.getppid())
            if self._release is not None:
                os.close(self._release)
                os.environ[VARIABLE] = str(reader)
                name_process(SETS_UP)

        self.ranks = fork_ranks(plan, number, port, preloaded, in_child)
        if reader is not None:
            os.close(reader)

    def release(self) -> None:
        """Have standby ranks go on, those that are not set up yet as soon as they are."""
        assert self._release is not None
        os.write(self._release, bytes(len(self.ranks.running)))
        os.close(self._release)
        self._release = None

    def close(self) -> None:
        """End the rendezvous. No rank runs any more."""
        if self._release is not None:
            os.close(self._release)
        if self._store is not None:
            self._store.close()


class Standby:
    """The ranks of the next start, set up ahead of a failure; none before they are asked for, or where one failed."""

    def __init__(self, plan: Plan, mask: Collection[int], tell: Callable[[str], object]) -> None:
        self._plan = plan
        self._mask = mask
        self._tell = tell
        self._start: Start | None = None

    def set_up(self, number: int) -> None:
        """Fork them, for the start of that number. In a rank this does not return."""
        if self._start is None:
            self._start = Start(self._plan, number, None, self._mask, waits=True)

    def look_after(self) -> None:
        """Have done with them if one has ended: the others cannot do without."""
        if self._start is None:
            return
        self._start.ranks.reap()
        if len(self._start.ranks.running) < self._plan.nproc_per_node:
            why = (self._start.ranks.failures or ["one has ended"])[0]
            self._tell(f"standby ranks: {why}; the next restart sets its ranks up itself")
            self.discard()

    def release(self) -> Start | None:
        """Have them take the place of ranks of which none is left; None if there are none."""
        self.look_after()
        start, self._start = self._start, None
        if start is not None:
            start.release()
        return start

    def discard(self) -> None:
        """Kill them, if there are any."""
        start, self._start = self._start, None
        if start is not None:
            start.ranks.kill_now()
            start.close()
