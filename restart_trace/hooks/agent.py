"""Hooks of torchrun's agent, in the process that launches the ranks of a node: records failures and relaunches."""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

from restart_trace.cycles import newest_cycle
from restart_trace.hooks.guard import Call, wrap
from restart_trace.hooks.session import Session
from restart_trace.process import versions
from restart_trace.supervisor import SupervisorTrace, open_supervisor_trace


class Agent:
    """The agent of one torchrun. Records nothing and makes no file unless traced ranks fail."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._trace: SupervisorTrace | None = None
        self._failed: int | None = None  # the cycle that failed, until it is relaunched
        self._started_wall_ns = 0

    @contextmanager
    def start(self, call: Call) -> Iterator[None]:
        """Around _start_workers."""
        self._record("relaunched")
        self._failed = None
        self._started_wall_ns = time.time_ns()
        yield
        versions()  # reads the installed packages now and caches them, so that a relaunch does not wait for that

    @contextmanager
    def monitor(self, call: Call) -> Iterator[None]:
        """Around _monitor_workers, which checks the ranks several times a second."""
        yield
        if call.result.state.name in ("FAILED", "UNHEALTHY") and self._failed is None:
            self._failed = self._cycle()
            self._record("detected")

    @contextmanager
    def stop(self, call: Call) -> Iterator[None]:
        """Around _stop_workers."""
        yield
        self._record("stopped")

    def _cycle(self) -> int | None:
        """The cycle claimed since the ranks were started; None if they failed before claiming one."""
        directory = self._session.trace_dir
        newest = newest_cycle(directory) if directory.is_dir() else None
        if newest is None or int(newest[1].get("wall_ns", 0)) < self._started_wall_ns:
            return None
        return newest[0]

    def _record(self, phase: str) -> None:
        if self._failed is None:
            return
        if self._trace is None:
            stack = ExitStack()
            self._trace = stack.enter_context(open_supervisor_trace(self._session.trace_dir, "hooks"))
            atexit.register(stack.close)
        self._trace.failure(phase, cycle=self._failed)


def hook(session: Session, module: ModuleType) -> None:
    """Hook torch.distributed.elastic.agent.server.local_elastic_agent."""
    agent = Agent(session)
    wrap(module.LocalElasticAgent, "_start_workers", agent.start)
    wrap(module.LocalElasticAgent, "_monitor_workers", agent.monitor)
    wrap(module.LocalElasticAgent, "_stop_workers", agent.stop)
