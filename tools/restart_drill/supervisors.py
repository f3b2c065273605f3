"""What makes the ranks run again: the drill, which launches the whole job again, or torchrun's agent, in place.

Each writes the failure records of docs/restart_drill.md into the trace: what it does itself, or what it observes.
"""

from __future__ import annotations

import contextlib
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from restart_trace.clock import now_ns, process_start_ns
from restart_trace.supervisor import open_supervisor_trace

from .faults import MAY_END_WELL
from .launch import GRACE_S, DrillError, Launch, launched
from .plan import TORCHRUN, Plan

_POLL_S = 0.002


class Supervisor(ABC):
    """Runs a job through its strikes; a context, at whose end no process is left.

    For each cycle: `start`, then a strike while `launch` runs, then `wait_until_down`, then `let_restart`.
    """

    waits = False  # whether the ranks stay down until `let_restart`
    launch: Launch

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Supervisor:
        self.trace = self._stack.enter_context(open_supervisor_trace(self.plan.trace_dir))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _launch(self, number: int) -> Launch:
        command, log = self.plan.command_of(number), self.plan.log_of(number)
        return self._stack.enter_context(launched(command, log, self.plan.echo))

    @abstractmethod
    def start(self, cycle: int) -> None:
        """Let `launch` be the one in which the ranks of `cycle` run."""

    @abstractmethod
    def has_failed(self) -> bool:
        """Whether the supervisor knows of a failure of this cycle."""

    @abstractmethod
    def wait_until_down(self, cycle: int, fault: str, hangs: bool) -> int | None:
        """Return when no process of the ranks is left: the exit code of the launcher, None if it runs on.

        `hangs`: nothing has failed yet, and is ended here. Raises DrillError if the job did not fail as it should.
        """

    @abstractmethod
    def let_restart(self, cycle: int, fault: str) -> None:
        """Return when the ranks of the next cycle may be started, or have been. Raises DrillError if none are."""


class Relaunch(Supervisor):
    """--supervisor relaunch: each strike brings the whole job down, and the drill launches it again."""

    waits = True

    def start(self, cycle: int) -> None:
        self.launch = self._launch(cycle)

    def has_failed(self) -> bool:
        return self.launch.exit_code is not None

    def wait_until_down(self, cycle: int, fault: str, hangs: bool) -> int | None:
        self.trace.failure("detected", cycle=cycle)
        if hangs:
            self.launch.kill(Launch.everything)
            exit_code = -int(signal.SIGSTOP)
        else:
            exit_code = self.launch.wait(GRACE_S)
            if exit_code == 0 and fault not in MAY_END_WELL:
                raise DrillError(f"--fault {fault}: the launcher ended with exit code 0 all the same")
        self.launch.wait_until_gone(GRACE_S)
        self.trace.failure("stopped", cycle=cycle)
        return exit_code

    def let_restart(self, cycle: int, fault: str) -> None:
        self.trace.failure("relaunched", cycle=cycle)


class TorchrunAgent(Supervisor):
    """--supervisor torchrun: one launch, whose elastic agent stops and restarts the ranks in place after each strike.

    The agent writes no records, so the drill writes what it observes:

        detected    the agent's log line on the failed rank arrived; for a hang, which no agent notices, the drill found
                    that no iteration had come for --hang-limit seconds, and killed the rank that hung
        stopped     the last process of the old ranks was gone. The agent starts none before, so if a new one was
                    started before the drill had looked, its start is taken, which is the closer bound
        relaunched  the first process of the new ranks was started, by the kernel's own account (10 ms resolution)
    """

    def start(self, cycle: int) -> None:
        if cycle == 0:
            self.launch = self._launch(0)

    def has_failed(self) -> bool:
        return self.launch.agent_saw_ns is not None or self.launch.exit_code is not None

    def wait_until_down(self, cycle: int, fault: str, hangs: bool) -> int | None:
        if hangs:
            self.trace.failure("detected", cycle=cycle)
            self.launch.send(signal.SIGKILL, self.launch.ranks()[-1:])
            self._until(self.has_failed, "torchrun's agent noticed the failure")
        if self.launch.agent_saw_ns is None:
            raise self._not_restarted(fault)
        if not hangs:
            self.trace.failure("detected", cycle=cycle, at_ns=self.launch.agent_saw_ns)
        self._until(lambda: not self.launch.of_ranks(), "the processes of the old ranks were gone")
        self._gone_ns = now_ns()
        return None

    def let_restart(self, cycle: int, fault: str) -> None:
        self.launch.await_ranks(
            self.plan.trace_dir, cycle + 1, self.plan.limit_s, lambda: self.launch.exit_code is not None
        )
        starts = [process_start_ns(process.pid) for process in self.launch.ranks()]
        found = [start for start in starts if start is not None]
        if not found:
            raise self._not_restarted(fault)
        self.trace.failure("stopped", cycle=cycle, at_ns=min(self._gone_ns, *found))
        self.trace.failure("relaunched", cycle=cycle, at_ns=min(found))
        self.launch.has_recovered()

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.plan.limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise DrillError(
                    f"--supervisor torchrun: {self.plan.limit_s:g} s passed before {what}; raise --time-limit"
                )
            time.sleep(_POLL_S)

    def _not_restarted(self, fault: str) -> DrillError:
        return DrillError(
            f"--supervisor torchrun: after {fault} torchrun ended with exit code {self.launch.exit_code} and restarted "
            "nothing; see its log"
        )


def supervisor_of(plan: Plan) -> Supervisor:
    """The supervisor that the plan asks for."""
    return TorchrunAgent(plan) if plan.supervisor == TORCHRUN else Relaunch(plan)
