"""The plan of a drill, and the record of each injected fault."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.config.uris import Location

from .injection_points import AFTER_COMMIT, RESTART_STAGES, InjectionPoint

RELAUNCH, TORCHRUN, LAUNCH, IN_PROCESS = "relaunch", "torchrun", "launch", "in-process"
FORK = "fork"  # the launcher of LAUNCH and IN_PROCESS, megatron.launch; the other known launcher is TORCHRUN
SUPERVISORS = (RELAUNCH, TORCHRUN, LAUNCH, IN_PROCESS)
BY_FORK = (LAUNCH, IN_PROCESS)


class PlannedInjection(NamedTuple):
    """A fault, and the point at which it is to be injected.

    Unless the point is in a restart, it counts only after its cycle has committed `commits` checkpoints.
    """

    fault: str
    point: InjectionPoint
    commits: int = 0


def injection_before_restart(supervisor: str) -> PlannedInjection:
    """The injection that causes the restart which another fault is to hit."""
    fault = "sigkill-one" if supervisor in BY_FORK else "sigkill-all"
    return PlannedInjection(fault, AFTER_COMMIT)


@dataclass(frozen=True)
class Saves:
    """How often the training saves, as far as its command shows it.

    `interval`: iterations between saves. `until_stored`: number of saves until one goes to storage. `in_memory`: the
    launcher holds saves in memory.
    """

    interval: int | None = None
    until_stored: int = 1
    in_memory: bool = False


@dataclass(frozen=True)
class Plan:
    """What each launch of a drill runs. Both commands are complete; `resumed_command` trains after the first fault."""

    command: list[str]
    resumed_command: list[str]
    supervisor: str
    out: Path
    checkpoints: Location
    limit_s: float
    hang_limit_s: float  # time without an iteration after which a job counts as hanging
    echo: bool
    faults: tuple[str, ...] = ()  # that may be injected
    restarts: int = 0  # number of restarts in place that the launcher may make
    launches_again: bool = False  # with BY_FORK: a launch that a fault has ended is started again
    cold_cache: bool = False
    disk_limit_bytes: int = 0  # largest file system that disk-full may fill
    to_the_end: bool = True  # False: the last launch is ended once it has caught up
    persist_interval: int | None = None  # added to commands that use engine memory; None: left as in the command
    saves: Saves = Saves()
    nodes_command: tuple[str, ...] = ()  # the program that injects faults into nodes; () for a job on this host alone
    nodes: tuple[int, ...] = (-1,)  # indices of the training nodes that faults go to

    @property
    def on_nodes(self) -> bool:
        """Whether the job runs on several nodes and faults are injected into them."""
        return bool(self.nodes_command)

    @property
    def saves_until_resumable(self) -> int:
        """Number of saves until one survives the fault: saves in memory end with their launcher or replica group."""
        return 1 if self.supervisor in BY_FORK and len(self.nodes) == 1 else self.saves.until_stored

    @property
    def trace_dir(self) -> Path:
        return self.out / "trace"

    def command_of(self, launch: int) -> list[str]:
        """The command of launch number `launch`, counted from 0."""
        return self.command if launch == 0 else self.resumed_command

    def log_of(self, launch: int) -> Path:
        return self.out / "logs" / f"cycle_{launch:03d}.log"


@dataclass(frozen=True)
class Injection:
    """A fault that was injected, and its effect. The fields are keys of drill.json."""

    cycle: int
    fault: str
    injection_point: str
    iteration: int  # newest iteration that rank 0 had finished
    processes: int  # number of processes that the fault reached
    exit_code: int | None  # of the launcher; None if it restarted the ranks itself
    expected_step: int  # step of the newest complete checkpoint that the fault left
    expected_tier: str | None = None  # its tier, one of TIERS of the trace; None if all saves are on storage only
    lost_at_most: int | None = None  # finished iterations that may be lost, by the interval of saves to that tier
    failed_save: str | None = None  # error of the save that the fault made fail while training continued
    damaged: str | None = None  # file of the newest checkpoint, or slot of the newest save in memory
    cache: str = "warm"  # of the checkpoints at the relaunch; "cold" only if verified, on the host of the drill
    unnamed: tuple[str, ...] = ()  # a message for each rank that ended without naming the stopped rank
    named_s: float | None = None  # from the stop of a rank until all others had named it
    drill_s: float = 0.0  # time that the drill itself took between the end of the job and the relaunch


def planned_injections(
    fault: str, point: InjectionPoint, cycles: int, supervisor: str = RELAUNCH
) -> tuple[PlannedInjection, ...]:
    """`cycles` injections. If they are during a restart, another one comes first, which causes a restart."""
    injections = (PlannedInjection(fault, point),) * cycles
    return (injection_before_restart(supervisor), *injections) if point.stage in RESTART_STAGES else injections


def say(text: str) -> None:
    """Print a status line, marked as the drill's to set it apart from the output of the job."""
    print(f"[restart_drill] {text}", file=sys.stderr, flush=True)
