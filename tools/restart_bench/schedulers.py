"""Slurm and PBS: what a job asks of each, and the command that takes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resources:
    """What a job asks for. `time`: as H:MM:SS; `gpus`: of each node, as many as tasks, or none."""

    name: str
    nodes: int
    tasks: int
    gpus: bool
    time: str
    output: Path


class Scheduler(ABC):
    """`command` takes a job script as its last word, and prints the job's number."""

    name: str
    command: Sequence[str]

    @abstractmethod
    def directives(self, asked: Resources) -> list[str]:
        """Comment lines at the top of the job script."""


SIGNALLED_BEFORE_END_S = 120
SHUTDOWN_TIMEOUT_VARIABLE = "MEGATRON_SHUTDOWN_TIMEOUT"  # of megatron.processes.parent_process


class Slurm(Scheduler):
    """SIGTERM comes SIGNALLED_BEFORE_END_S before the time limit, in which a training saves."""

    name = "slurm"
    command = ("sbatch", "--parsable")

    def directives(self, asked: Resources) -> list[str]:
        options = [
            f"job-name={asked.name}", f"nodes={asked.nodes}", f"ntasks-per-node={asked.tasks}", f"time={asked.time}",
            "requeue", f"signal=SIGTERM@{SIGNALLED_BEFORE_END_S}", f"output={asked.output}/slurm-%j.out",
            "open-mode=append",
        ]  # fmt: skip
        options += [f"gpus-per-node={asked.tasks}"] if asked.gpus else []
        return [f"#SBATCH --{option}" for option in options]


class Pbs(Scheduler):
    """With these directives PBS_NODEFILE names a host once for each of its tasks."""

    name = "pbs"
    command = ("qsub",)

    def directives(self, asked: Resources) -> list[str]:
        chunk = f"ncpus={asked.tasks}:mpiprocs={asked.tasks}" + (f":ngpus={asked.tasks}" if asked.gpus else "")
        options = [
            f"N {asked.name}", f"l select={asked.nodes}:{chunk}", "l place=scatter", f"l walltime={asked.time}", "r y",
            "j oe", f"o {asked.output}/",
        ]  # fmt: skip
        return [f"#PBS -{option}" for option in options]


SCHEDULERS = {scheduler.name: scheduler for scheduler in (Slurm(), Pbs())}
