"""What makes the ranks run again: the drill, which launches the whole job again; torchrun's agent or megatron.launch,
in place; or the agents of megatron.launch on several nodes.

The first two write the failure records of docs/restart_drill.md into the trace: what the drill does itself, or what it
observes.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from restart_trace.clock import now_ns, process_start_ns
from restart_trace.schema import SUPERVISOR_FILE_PATTERN
from restart_trace.supervisor import open_supervisor_trace

from .faults import DAMAGE, ENDPOINT_VARIABLES, MAY_END_WELL, of_storage, store_endpoint
from .kept import Kept, KeptSaves
from .launch import GRACE_S, DrillError, Launch, cleaned_up, launched
from .moments import Tail, TraceTail
from .nodes import LaunchOnNodes, nodes_of
from .plan import LAUNCH, TORCHRUN, Plan
from .storage_proxy import FaultProxy

_POLL_S = 0.002
_MEND_POLL_S = 0.05


class Supervisor(ABC):
    """Runs a job through its strikes; a context, at whose end no process is left.

    For each cycle: `start`, then a strike while `launch` runs, then `wait_until_down`, then `let_restart`.
    """

    waits = False  # whether the ranks stay down until `let_restart`
    launch: Launch

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._stack = contextlib.ExitStack()
        self._kept: KeptSaves | None = None
        self.proxy: FaultProxy | None = None  # before the store, if that is to be struck

    def __enter__(self) -> Supervisor:
        if any(of_storage(intent.fault) for intent in self.plan.strikes):
            self.proxy = self._stack.enter_context(FaultProxy(store_endpoint()).running())
        self.trace = self._stack.enter_context(open_supervisor_trace(self.plan.trace_dir))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _launch(self, number: int) -> Launch:
        command, log = self.plan.command_of(number), self.plan.log_of(number)
        if self.proxy is not None:
            command = ["env", f"{ENDPOINT_VARIABLES[0]}={self.proxy.url}", *command]
        launch = self._stack.enter_context(launched(command, log, self.plan.echo))
        if self.plan.keeps_saves:
            self._kept = KeptSaves(launch.pid)
        return launch

    def kept_saves(self) -> Kept | None:
        """Those of the launchers, if their ranks' engine keeps any."""
        return self._kept

    def prepare(self, fault: str) -> None:
        """What has to be done before the fault is caused."""
        return None

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


class LauncherInPlace(Supervisor):
    """--supervisor launch: one launch of megatron.launch, which starts all ranks again after each strike.

    It writes `detected`, `stopped` and `relaunched` itself; the drill reads them. What is to be damaged between two
    starts is damaged while the launcher is stopped.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._tails: dict[Path, Tail] = {}
        self._seen: set[tuple[str, int]] = set()  # (phase, cycle) of the failures on record
        self._cycle = 0
        self._stopped = False  # the launcher

    def start(self, cycle: int) -> None:
        self._cycle = cycle
        if cycle == 0:
            self.launch = self._launch(0)

    def prepare(self, fault: str) -> None:
        self._stopped = fault in DAMAGE
        if self._stopped:
            self.launch.send(signal.SIGSTOP, self.launch.launcher())

    def has_failed(self) -> bool:
        if self._stopped:
            return not self.launch.of_ranks()
        return self._recorded("detected") or self.launch.exit_code is not None

    def wait_until_down(self, cycle: int, fault: str, hangs: bool) -> int | None:
        if hangs:
            self.trace.failure("detected", cycle=cycle)
            self.launch.send(signal.SIGKILL, self.launch.ranks()[-1:])
        if not self._stopped:
            self._until_relaunched(fault)
        return None

    def let_restart(self, cycle: int, fault: str) -> None:
        if self._stopped:
            self._stopped = False
            self.launch.send(signal.SIGCONT, self.launch.launcher())
            self._until_relaunched(fault)
        self.launch.await_ranks(
            self.plan.trace_dir, cycle + 1, self.plan.limit_s, lambda: self.launch.exit_code is not None
        )
        self.launch.has_recovered()

    def _until_relaunched(self, fault: str) -> None:
        deadline = time.monotonic() + self.plan.limit_s
        while not self._recorded("relaunched"):
            if self.launch.exit_code is not None:
                raise DrillError(
                    f"--supervisor launch: after {fault} the launch ended with exit code {self.launch.exit_code} and "
                    f"restarted nothing; see {self.launch.log_path}.{self._needs}"
                )
            if time.monotonic() > deadline:
                raise DrillError(
                    f"--supervisor launch: {self.plan.limit_s:g} s passed before ranks were started again; raise "
                    "--time-limit"
                )
            time.sleep(_POLL_S)

    _needs = ""  # what else may be missing

    def _recorded(self, phase: str) -> bool:
        """Whether the launch has put this phase of the cycle's failure on record."""
        for path in self.plan.trace_dir.glob(SUPERVISOR_FILE_PATTERN.replace("{index:03d}", "*")):
            for record in self._tails.setdefault(path, Tail(path)).new_records():
                if record["type"] == "event" and record["operation"] == "failure":
                    self._seen.add((record["phase"], record["cycle"]))
        return (phase, self._cycle) in self._seen


class AgentsOnNodes(LauncherInPlace):
    """--supervisor launch with --nodes-command: one launch over several nodes.

    A node that was harmed, and lives, is mended after the first step of the ranks that follow.
    """

    _needs = " It needs a spare, and MAX_RESTARTS"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Supervisor:
        super().__enter__()
        self._nodes = self._stack.enter_context(nodes_of(list(self.plan.nodes_command), self.plan.nodes))
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        super().__exit__(*exc)

    def start(self, cycle: int) -> None:
        self._cycle = cycle
        if cycle > 0:
            self._threads.append(threading.Thread(target=self._mend_after_first_step, args=(cycle,), daemon=True))
            self._threads[-1].start()
            return
        plan = self.plan
        self._on_nodes = LaunchOnNodes(plan.command, plan.log_of(0), plan.echo, self._nodes, plan.trace_dir)
        self.launch = self._stack.enter_context(cleaned_up(self._on_nodes))

    def kept_saves(self) -> Kept | None:
        return self._on_nodes.kept() if self.plan.keeps_saves else None

    def _mend_after_first_step(self, cycle: int) -> None:
        tail = TraceTail(self.plan.trace_dir, cycle)
        while not any(record["type"] == "iteration" for record in tail.new_records()):
            if self._closing.wait(_MEND_POLL_S):
                return
        with contextlib.suppress(DrillError):  # tried again at the end, where an error is one
            self._nodes.mend(before=cycle)


def supervisor_of(plan: Plan) -> Supervisor:
    """The supervisor that the plan asks for."""
    in_place = AgentsOnNodes if plan.on_nodes else LauncherInPlace
    return {TORCHRUN: TorchrunAgent, LAUNCH: in_place}.get(plan.supervisor, Relaunch)(plan)
