"""Starts all ranks of a node and their rendezvous; standby ranks of the next start may be forked before a failure."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection
from dataclasses import replace

from megatron.launch.plan import Plan
from megatron.launch.ranks import Forks, Ranks
from megatron.launch.rendezvous_store import RendezvousStore
from megatron.processes.process_name import name_process
from megatron.processes.standby import LAUNCHER_VARIABLE, LOAD, LOADS_VARIABLE, RELEASE, SETS_UP, VARIABLE
from restart_trace.startup import Preload


class RendezvousError(Exception):
    """The rendezvous of the ranks cannot be served at --master-port."""


class Start:
    """Ranks that run, or standby ranks, which set themselves up and wait for `release`."""

    def __init__(
        self,
        plan: Plan,
        number: int,
        preloaded: Preload | None,
        mask: Collection[int],
        *,
        waits: bool = False,
        before: Ranks | None = None,
    ) -> None:
        """Fork them; with `before` those alone that have ended of that start, until `complete` is called.

        `number`: of restarts before it; `mask`: the signals that they have blocked. In a rank this does not return, as
        of Forks. Raises RendezvousError if the rendezvous cannot be served.
        """
        self.number = number
        self._store: RendezvousStore | None = None
        port = plan.master_port or 0
        if plan.node_rank == 0:
            try:
                self._store = RendezvousStore(plan.master_addr, port, plan.bind)
            except OSError as error:
                raise RendezvousError(
                    f"--master-port {plan.master_port}: the rendezvous cannot be served there: {error.strerror}; name "
                    "a port that is free on this node"
                ) from error
            port, plan = self._store.port, replace(plan, master_addr=self._store.master_addr)
        pipes = [os.pipe() for _ in range(plan.nproc_per_node)] if waits else []
        self._writers = [writer for _, writer in pipes]
        asks = plan.standby and number < plan.max_restarts

        def in_child(local_rank: int) -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if self._store is not None:
                self._store.leave()
            if asks:
                os.environ[LAUNCHER_VARIABLE] = str(os.getppid())
            if plan.standby_load:
                os.environ[LOADS_VARIABLE] = "1"
            for number, ends in enumerate(pipes):
                for end in ends[1:] if number == local_rank else ends:
                    os.close(end)
            if pipes:
                os.environ[VARIABLE] = str(pipes[local_rank][0])
                name_process(SETS_UP)

        self._forks = Forks(plan, number, port, preloaded, in_child)
        self.ranks = self._forks.ranks
        if before is None:
            self._forks.complete(None)
        else:
            self._forks.fork_lost(before)
        if self._store is not None:
            self._store.serve()  # the ranks, which have much to do before they connect, have begun by now
        for reader, _ in pipes:
            os.close(reader)

    def complete(self, before: Ranks) -> None:
        """Take over the ranks that have returned from the start before, and fork the others that are missing."""
        self._forks.complete(before)

    def load(self) -> None:
        """Have standby ranks load the newest checkpoint, once they are set up."""
        self._tell(LOAD)

    def release(self) -> None:
        """Have standby ranks go on, those that are not set up yet as soon as they are."""
        self._tell(RELEASE)
        self._close_pipes()

    def _tell(self, what: bytes) -> None:
        for writer in self._writers:
            with contextlib.suppress(BrokenPipeError):  # of a rank that has ended, as will be seen
                os.write(writer, what)

    def _close_pipes(self) -> None:
        for writer in self._writers:
            os.close(writer)
        self._writers = []

    def close(self) -> None:
        """End the rendezvous. No rank needs it any more."""
        self._close_pipes()
        if self._store is not None:
            self._store.close()
            self._store = None


class Standby:
    """The ranks of the next start, set up ahead of a failure; none before they are asked for, or where one failed."""

    def __init__(self, plan: Plan, mask: Collection[int], tell: Callable[[str], object]) -> None:
        self._plan = plan
        self._mask = mask
        self._tell = tell
        self._start: Start | None = None
        self._given_up: int | None = None  # of this start one has ended

    def asked(self, number: int) -> None:
        """Fork them, for the start of that number; in a rank this does not return. Have them load if they are there."""
        if self._start is not None:
            self._start.load()
        elif number != self._given_up:
            self._start = Start(self._plan, number, None, self._mask, waits=True)

    def look_after(self) -> None:
        """Have done with them if one has ended: the others cannot do without."""
        if self._start is None:
            return
        self._start.ranks.reap()
        if len(self._start.ranks.running) < self._plan.nproc_per_node:
            why = (self._start.ranks.failures or ["one has ended"])[0]
            self._tell(f"standby ranks: {why}; the next restart sets its ranks up itself")
            self._given_up = self._start.number
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
