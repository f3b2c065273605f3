"""The supervisors, which restart the ranks.

The drill launches the job again; torchrun's agent or megatron.launch restart the ranks in place; the agents of
megatron.launch restart them on several nodes.

For the drill and for torchrun's agent, the drill writes the failure records of docs/restart_drill.md into the trace, of
what it does itself or observes.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.config.uris import ObjectStore, ObjectUri
from megatron.startup.injected_faults import HOLD_SIGNAL
from restart_trace.clock import now_ns, process_start_ns
from restart_trace.schema import SUPERVISOR_FILE_PATTERN
from restart_trace.supervisor import open_supervisor_trace

from .faults import DAMAGE, MAY_END_WELL, proxy_fault, store_endpoint
from .injection_points import Tail, TraceTail
from .launch import GRACE_S, DrillError, Launch, cleaned_up, launched
from .memory_saves import LauncherMemorySaves, MemorySaves
from .nodes import LaunchOnNodes, nodes_of
from .plan import BY_FORK, TORCHRUN, Plan
from .storage_proxy import FaultProxy

_POLL_S = 0.002
_REPAIR_POLL_S = 0.05


class Supervisor(ABC):
    """Runs a job through its injected faults. A context manager; when it ends no process is left.

    For each cycle: `start`, then an injection while `launch` runs, then `wait_until_down`, then `let_restart`.
    """

    _needs = ""  # a hint at what the command may lack
    waits = False  # whether the ranks stay down until `let_restart`
    launch: Launch

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._stack = contextlib.ExitStack()
        self._memory_saves: LauncherMemorySaves | None = None
        self.proxy: FaultProxy | None = None  # in front of the store, if faults are injected into that

    def __enter__(self) -> Supervisor:
        if any(map(proxy_fault, self.plan.faults)):
            self.proxy = self._stack.enter_context(FaultProxy(store_endpoint(self._store)).running())
        self.trace = self._stack.enter_context(open_supervisor_trace(self.plan.trace_dir))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def _store(self) -> ObjectStore:
        assert isinstance(self.plan.checkpoints, ObjectUri)
        return self.plan.checkpoints.store

    def _launch(self, number: int) -> Launch:
        command, log = self.plan.command_of(number), self.plan.log_of(number)
        if self.proxy is not None:
            command = ["env", f"{self._store.endpoints[0]}={self.proxy.url}", *command]
        launch = self._stack.enter_context(launched(command, log, self.plan.echo))
        if self.plan.saves.in_memory:
            self._memory_saves = LauncherMemorySaves(launch.pid)
        return launch

    def memory_saves(self) -> MemorySaves | None:
        """The saves that the launchers hold in memory; None if the engine keeps none there."""
        return self._memory_saves

    def prepare(self, fault: str) -> None:
        """Do what is needed before the fault is injected."""
        return None

    def _wait_until_gone(self, cycle: int, fault: str) -> int:
        """Wait until no process is left of a launch that the fault has ended. Returns the launcher's exit code."""
        exit_code = self.launch.wait(GRACE_S)
        if exit_code == 0 and fault not in MAY_END_WELL:
            raise DrillError(f"--fault {fault}: the launcher ended with exit code 0 in spite of the fault")
        self.launch.wait_until_gone(GRACE_S)
        self.trace.failure("stopped", cycle=cycle)
        return exit_code

    def _fail_last_rank(self, cycle: int) -> None:
        """End a hang, which neither launcher nor agent notices."""
        self.trace.failure("detected", cycle=cycle)
        self.launch.send(signal.SIGKILL, self.launch.ranks()[-1:])

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.plan.limit_s
        while not condition():
            if time.monotonic() > deadline:
                raise DrillError(
                    f"--supervisor {self.plan.supervisor}: {self.plan.limit_s:g} s passed before {what}; raise "
                    "--time-limit"
                )
            time.sleep(_POLL_S)

    def _has_ended(self) -> bool:
        return self.launch.exit_code is not None

    def _await_ranks(self, cycle: int) -> None:
        """Wait until all ranks of `cycle` have started, or the launch has ended."""
        self.launch.await_ranks(self.plan.trace_dir, cycle, self.plan.limit_s, self._has_ended)

    def _not_restarted(self, fault: str) -> DrillError:
        return DrillError(
            f"--supervisor {self.plan.supervisor}: after {fault} the launch ended with exit code "
            f"{self.launch.exit_code} and restarted nothing; see {self.launch.log_path}.{self._needs}"
        )

    @abstractmethod
    def start(self, cycle: int) -> None:
        """Set `launch` to the launch in which the ranks of `cycle` run."""

    @abstractmethod
    def has_failed(self) -> bool:
        """Whether the supervisor has detected a failure of this cycle."""

    @abstractmethod
    def wait_until_down(self, cycle: int, fault: str, hangs: bool) -> int | None:
        """Wait until no process of the ranks is left. Returns the launcher's exit code, or None if it still runs.

        `hangs`: no process has failed, so this method ends them. Raises DrillError if the job did not fail as expected.
        """

    @abstractmethod
    def let_restart(self, cycle: int, fault: str) -> None:
        """Return once the ranks of the next cycle may be started, or have been. Raises DrillError if they are not."""


class Relaunch(Supervisor):
    """--supervisor relaunch: each fault ends the whole job, and the drill launches it again."""

    waits = True

    def start(self, cycle: int) -> None:
        self.launch = self._launch(cycle)

    def has_failed(self) -> bool:
        return self._has_ended()

    def wait_until_down(self, cycle: int, fault: str, hangs: bool) -> int | None:
        self.trace.failure("detected", cycle=cycle)
        if hangs:
            self.launch.kill(Launch.everything)
        exit_code = self._wait_until_gone(cycle, fault)
        return -int(signal.SIGSTOP) if hangs else exit_code

    def let_restart(self, cycle: int, fault: str) -> None:
        self.trace.failure("relaunched", cycle=cycle)


class TorchrunAgent(Supervisor):
    """--supervisor torchrun: one launch, whose elastic agent stops and restarts the ranks in place after each fault.

    The agent writes no records, so the drill writes what it observes:

        detected    the agent logged the failed rank. An agent does not detect a hang: there it is the time at which the
                    drill had seen no iteration for --hang-limit seconds and killed the rank that hung
        stopped     the last process of the old ranks was gone. The agent starts no new process before that, so if the
                    drill first looked after a new one had started, the start of that process is the better bound
        relaunched  the first process of the new ranks was started, according to the kernel (10 ms resolution)
    """

    def start(self, cycle: int) -> None:
        if cycle == 0:
            self.launch = self._launch(0)

    def has_failed(self) -> bool:
        return self.launch.agent_saw_ns is not None or self._has_ended()

    def wait_until_down(self, cycle: int, fault: str, hangs: bool) -> int | None:
        if hangs:
            self._fail_last_rank(cycle)
            self._until(self.has_failed, "torchrun's agent noticed the failure")
        if self.launch.agent_saw_ns is None:
            raise self._not_restarted(fault)
        if not hangs:
            self.trace.failure("detected", cycle=cycle, at_ns=self.launch.agent_saw_ns)
        self._until(lambda: not self.launch.of_ranks(), "the processes of the old ranks were gone")
        self._gone_ns = now_ns()
        return None

    def let_restart(self, cycle: int, fault: str) -> None:
        self._await_ranks(cycle + 1)
        starts = [process_start_ns(process.pid) for process in self.launch.ranks()]
        found = [start for start in starts if start is not None]
        if not found:
            raise self._not_restarted(fault)
        self.trace.failure("stopped", cycle=cycle, at_ns=min(self._gone_ns, *found))
        self.trace.failure("relaunched", cycle=cycle, at_ns=min(found))
        self.launch.has_recovered()


class LauncherInPlace(Supervisor):
    """--supervisor launch, in-process: one launch of megatron.launch, which starts all ranks again after each fault.

    With in-process those that live start again in their processes. The launcher writes `detected`, `stopped` and
    `relaunched` itself, and the drill reads these records. Damage between two starts is done while the launcher is
    stopped (SIGSTOP).
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._tails: dict[Path, Tail] = {}
        self._seen: set[tuple[str, int]] = set()  # (phase, cycle) of the recorded failures
        self._cycle = 0
        self._stopped = False  # whether the launcher is stopped

    def start(self, cycle: int) -> None:
        self._cycle = cycle
        if cycle == 0:
            self.launch = self._launch(0)

    def prepare(self, fault: str) -> None:
        self._stopped = fault in DAMAGE
        if self._stopped:
            self.launch.send(signal.SIGSTOP, self.launch.launcher())

    @contextlib.contextmanager
    def while_ranks_return(self, kill: Callable[[], int]) -> Iterator[int]:
        """Call `kill`, for the last rank. The body runs while the others return, and the launcher starts none until its
        end. Yields what `kill` returns.

        The rank before it is held in its return until the launcher has noticed, and is stopped.
        """
        held = self.launch.ranks()[-2:-1]
        self.launch.send(HOLD_SIGNAL, held)
        killed = kill()
        self._until(self.has_failed, "the launcher noticed the failure")
        self.launch.send(signal.SIGSTOP, self.launch.launcher())
        try:
            self.launch.send(HOLD_SIGNAL, held)
            yield killed
        finally:
            self.launch.send(signal.SIGCONT, self.launch.launcher())

    def has_failed(self) -> bool:
        if self._stopped:
            return not self.launch.of_ranks()
        return self._recorded("detected") or self._has_ended()

    def wait_until_down(self, cycle: int, fault: str, hangs: bool) -> int | None:
        if hangs:
            self._fail_last_rank(cycle)
        if not self._stopped:
            self._until_relaunched(fault)
        return None

    def let_restart(self, cycle: int, fault: str) -> None:
        if self._stopped:
            self._stopped = False
            self.launch.send(signal.SIGCONT, self.launch.launcher())
            self._until_relaunched(fault)
        self._await_ranks(cycle + 1)
        self.launch.has_recovered()

    def _until_relaunched(self, fault: str) -> None:
        self._until(lambda: self._recorded("relaunched") or self._has_ended(), "the ranks were restarted")
        if not self._recorded("relaunched"):
            raise self._not_restarted(fault)

    def _recorded(self, phase: str) -> bool:
        """Whether the launch has recorded this phase of the cycle's failure."""
        for path in self.plan.trace_dir.glob(SUPERVISOR_FILE_PATTERN.replace("{index:03d}", "*")):
            for record in self._tails.setdefault(path, Tail(path)).new_records():
                if record["type"] == "event" and record["operation"] == "failure":
                    self._seen.add((record["phase"], record["cycle"]))
        return (phase, self._cycle) in self._seen


class LauncherAgain(LauncherInPlace):
    """Like LauncherInPlace, but if a fault ends the launcher itself, the job is launched again."""

    def start(self, cycle: int) -> None:
        super().start(cycle)
        if self.launch.exit_code is not None:
            self.launch = self._launch(cycle)

    def wait_until_down(self, cycle: int, fault: str, hangs: bool) -> int | None:
        if self.launch.exit_code is None:
            return super().wait_until_down(cycle, fault, hangs)
        self.trace.failure("detected", cycle=cycle)
        return self._wait_until_gone(cycle, fault)

    def let_restart(self, cycle: int, fault: str) -> None:
        if self.launch.exit_code is None:
            super().let_restart(cycle, fault)
        else:
            self.trace.failure("relaunched", cycle=cycle)


class AgentsOnNodes(LauncherInPlace):
    """--supervisor launch with --nodes-command: one launch over several nodes.

    A node that has a fault and still runs is repaired after the first step of the restarted ranks.
    """

    _needs = " It needs a spare node, and MAX_RESTARTS"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> AgentsOnNodes:
        super().__enter__()
        self.nodes = self._stack.enter_context(nodes_of(list(self.plan.nodes_command), self.plan.nodes))
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        super().__exit__(*exc)

    def start(self, cycle: int) -> None:
        self._cycle = cycle
        if cycle > 0:
            self._threads.append(threading.Thread(target=self._repair_after_first_step, args=(cycle,), daemon=True))
            self._threads[-1].start()
            return
        plan = self.plan
        self.on_nodes = LaunchOnNodes(plan.command, plan.log_of(0), plan.echo, self.nodes, plan.trace_dir)
        self.launch = self._stack.enter_context(cleaned_up(self.on_nodes))

    def memory_saves(self) -> MemorySaves | None:
        return self.on_nodes.memory_saves() if self.plan.saves.in_memory else None

    def _repair_after_first_step(self, cycle: int) -> None:
        tail = TraceTail(self.plan.trace_dir, cycle)
        while not any(record["type"] == "iteration" for record in tail.new_records()):
            if self._closing.wait(_REPAIR_POLL_S):
                return
        with contextlib.suppress(DrillError):  # tried again at the end of the drill, where errors are reported
            self.nodes.repair(before=cycle)


def supervisor_of(plan: Plan) -> Supervisor:
    """The supervisor of a plan."""
    alone = LauncherAgain if plan.launches_again else LauncherInPlace
    in_place = AgentsOnNodes if plan.on_nodes else alone
    return {TORCHRUN: TorchrunAgent, **dict.fromkeys(BY_FORK, in_place)}.get(plan.supervisor, Relaunch)(plan)
