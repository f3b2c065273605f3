"""The course of a drill: launch, strike, see it end, launch again; then prove that nothing was lost but time."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.restart_trace import cycles
from megatron.restart_trace.supervisor import SupervisorTrace, open_supervisor_trace
from tools.restart_drill.faults import HANGS, MAY_END_WELL, inject
from tools.restart_drill.launch import DrillError, Launch, launched
from tools.restart_drill.moments import Moment, TraceTail, parse_moment, wait_for

GRACE_S = 20.0  # for what a launcher leaves behind, such as resource trackers


@dataclass(frozen=True)
class Plan:
    """What is drilled. `command` trains; where it saves and traces is appended to it."""

    command: list[str]
    fault: str
    moment: Moment
    cycles: int
    out: Path
    limit_s: float
    hang_limit_s: float  # without an iteration, until a job counts as hanging
    echo: bool

    @property
    def trace_dir(self) -> Path:
        return self.out / "trace"

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"


@dataclass(frozen=True)
class Strike:
    """A fault that was caused: in which launch, and how that launch ended."""

    cycle: int
    fault: str
    moment: str
    iteration: int  # the newest that rank 0 had finished
    processes: int  # that were struck
    exit_code: int


def run_drill(plan: Plan, say: Callable[[str], None]) -> list[Strike]:
    """Strike `plan.cycles` times and train to the end; the strikes. Raises DrillError, with no process left."""
    command = [
        *plan.command, "--save", str(plan.checkpoints), "--load", str(plan.checkpoints),
        "--restart-trace-dir", str(plan.trace_dir), "--verify-restored-state",
    ]  # fmt: skip
    strikes: list[Strike] = []
    if plan.moment.strikes_a_restart:
        say("the first launch is killed once there is a checkpoint to load")
        strikes.append(_launch_and_strike(plan, command, 0, "sigkill-all", parse_moment("after-commit")))
    for _ in range(plan.cycles):
        number = len(strikes)
        strikes.append(_launch_and_strike(plan, command, number, plan.fault, plan.moment))
        last = strikes[-1]
        say(
            f"cycle {number}: {last.fault} at {last.moment} struck {last.processes} processes after iteration "
            f"{last.iteration}; the launcher ended with exit code {last.exit_code}"
        )
    _finish(plan, command, len(strikes))
    return strikes


def _launch_and_strike(plan: Plan, command: list[str], number: int, fault: str, moment: Moment) -> Strike:
    with contextlib.ExitStack() as stack:
        launch = stack.enter_context(launched(command, _log(plan, number), plan.echo))
        iteration = wait_for(moment, launch, plan.trace_dir, number, number > 0, plan.limit_s)
        trace = stack.enter_context(open_supervisor_trace(plan.trace_dir))
        cycle = _traced_cycle(plan)
        trace.failure("injected", cycle=cycle, detail=fault, iteration=iteration)
        if launch.exit_code is not None:
            raise DrillError(
                f"the training ended before {fault} could strike at {moment.text}; let it train longer"
            )
        struck = inject(fault, launch)
        exit_code = _until_it_ends(plan, launch, fault, cycle)
        trace.failure("detected", cycle=cycle)
        if exit_code == 0 and fault not in MAY_END_WELL:
            raise DrillError(f"--fault {fault}: the launcher ended with exit code 0 all the same")
        if fault in HANGS:
            launch.look()
            launch.kill(Launch.everything)
        launch.wait_until_gone(GRACE_S)
        trace.failure("stopped", cycle=cycle)
        _relaunched(trace, cycle)
    return Strike(number, fault, moment.text, iteration, struck, exit_code)


def _relaunched(trace: SupervisorTrace, cycle: int) -> None:
    """The next launch follows at once: whatever is done in between would count as part of the restart."""
    trace.failure("relaunched", cycle=cycle)


def _until_it_ends(plan: Plan, launch: Launch, fault: str, cycle: int) -> int:
    """Exit code of the launcher; for a hang, -SIGSTOP once no iteration has come for long enough."""
    if fault not in HANGS:
        return launch.wait(plan.limit_s)
    tail = TraceTail(plan.trace_dir, cycle)
    progress = time.monotonic()
    while time.monotonic() - progress < plan.hang_limit_s:
        if any(record["type"] == "iteration" for record in tail.new_records()):
            progress = time.monotonic()
        if launch.exit_code is not None:
            return launch.exit_code
        time.sleep(0.05)
    return -int(signal.SIGSTOP)


def _finish(plan: Plan, command: list[str], number: int) -> None:
    """The last launch, which trains to its end."""
    with launched(command, _log(plan, number), plan.echo) as launch:
        exit_code = launch.wait(plan.limit_s)
        if exit_code != 0:
            raise DrillError(f"the last launch ended with exit code {exit_code}; see {_log(plan, number)}")
        launch.wait_until_gone(GRACE_S)


def run_reference(plan: Plan) -> Path:
    """Train without a fault, with checkpoints and trace of its own; the trace directory. Raises DrillError."""
    where = plan.out / "reference"
    trace_dir = where / "trace"
    command = [
        *plan.command, "--save", str(where / "checkpoints"), "--load", str(where / "checkpoints"),
        "--restart-trace-dir", str(trace_dir),
    ]  # fmt: skip
    with launched(command, where / "launch.log", plan.echo) as launch:
        exit_code = launch.wait(plan.limit_s)
        if exit_code != 0:
            raise DrillError(
                f"the reference run ended with exit code {exit_code}; see {where / 'launch.log'}"
            )
        launch.wait_until_gone(GRACE_S)
    return trace_dir


def _log(plan: Plan, number: int) -> Path:
    return plan.out / "logs" / f"cycle_{number:03d}.log"


def _traced_cycle(plan: Plan) -> int:
    newest = cycles.newest_cycle(plan.trace_dir) if plan.trace_dir.is_dir() else None
    if newest is None:
        raise DrillError(
            f"the command writes no trace to {plan.trace_dir}; it must be pretrain_gpt.py or launch it"
        )
    return newest[0]


def say(text: str) -> None:
    """Tell the user, apart from the output of the job."""
    print(f"[restart_drill] {text}", file=sys.stderr, flush=True)
