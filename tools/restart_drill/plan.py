"""What is drilled, and what came of each strike."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.config.uris import Place

from .moments import Moment, parse_moment

RELAUNCH, TORCHRUN, LAUNCH = "relaunch", "torchrun", "launch"
SUPERVISORS = (RELAUNCH, TORCHRUN, LAUNCH)


class Intent(NamedTuple):
    """A fault, and the moment at which it is to strike."""

    fault: str
    moment: Moment


def first(supervisor: str) -> Intent:
    """Makes the restart that others are to strike."""
    return Intent("sigkill-one" if supervisor == LAUNCH else "sigkill-all", parse_moment("after-commit"))


@dataclass(frozen=True)
class Plan:
    """What is drilled. `command` trains, `resumed_command` does so after the first strike; both are complete."""

    command: list[str]
    resumed_command: list[str]
    strikes: tuple[Intent, ...]
    supervisor: str
    out: Path
    checkpoints: Place
    limit_s: float
    hang_limit_s: float  # without an iteration, until a job counts as hanging
    echo: bool
    cold_cache: bool = False
    disk_limit_bytes: int = 0  # largest file system that disk-full may fill
    to_the_end: bool = True  # the last launch; else it is ended once it has caught up
    persist_interval: int | None = None  # that is put into commands of engine memory; None: as they have it
    keeps_saves: bool = False  # in memory that the launcher holds: engine memory
    save_interval: int | None = None  # iterations; None: the command does not tell
    saves_until_stored: int = 1  # of which every so many go to storage, too
    nodes_command: tuple[str, ...] = ()  # the program that harms nodes; () for a job on this host alone
    nodes: tuple[int, ...] = (-1,)  # which of those that train

    @property
    def on_nodes(self) -> bool:
        """Whether the job runs on several nodes, which are harmed."""
        return bool(self.nodes_command)

    @property
    def saves_until_left(self) -> int:
        """How many saves it takes until one is where a fault leaves it: memory goes with its launcher, or its group."""
        return 1 if self.supervisor == LAUNCH and len(self.nodes) == 1 else self.saves_until_stored

    @property
    def trace_dir(self) -> Path:
        return self.out / "trace"

    def command_of(self, launch: int) -> list[str]:
        """What is launched for the `launch`-th time, from 0."""
        return self.command if launch == 0 else self.resumed_command

    def log_of(self, launch: int) -> Path:
        return self.out / "logs" / f"cycle_{launch:03d}.log"


@dataclass(frozen=True)
class Strike:
    """A fault that was caused: in which cycle, and how that ended."""

    cycle: int
    fault: str
    moment: str
    iteration: int  # the newest that rank 0 had finished
    processes: int  # that were struck
    exit_code: int | None  # of the launcher; None if it restarted the ranks itself
    expected_step: int  # of the newest whole checkpoint that was left
    expected_tier: str | None = None  # where that was, of TIERS of the trace; None where all saves are on storage alone
    lost_at_most: int | None = None  # finished iterations that may be lost by the interval of saves there
    failed_save: str | None = None  # what the save that the fault made fail was told, and training went on
    damaged: str | None = None  # file of the newest checkpoint, or slot of the newest save in memory
    cache: str = "warm"  # of the checkpoints, at the relaunch: cold only where that was verified
    unnamed: tuple[str, ...] = ()  # ranks that ended without naming the rank that was stopped, and what is wrong
    named_s: float | None = None  # from the stop of a rank until all others had named it
    drill_s: float = 0.0  # what the drill itself did between the end of the job and the relaunch


def intended(fault: str, moment: Moment, cycles: int, supervisor: str = RELAUNCH) -> tuple[Intent, ...]:
    """`cycles` strikes, and one before them where they strike a restart, which there must be first."""
    strikes = (Intent(fault, moment),) * cycles
    return (first(supervisor), *strikes) if moment.strikes_a_restart else strikes


def say(text: str) -> None:
    """Tell the user, apart from the output of the job."""
    print(f"[restart_drill] {text}", file=sys.stderr, flush=True)
