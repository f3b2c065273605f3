"""Slurm and PBS: what a job asks of each, the command that takes it, and how its ranks find their hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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
    """`command` takes a job script as its last word, and prints the job's number. `job_id`: set within its jobs.

    `host_file`: names the file of a job's hosts, one line for each task, over which a launcher starts the ranks; "":
    the scheduler starts them itself, by a launcher that is marked `by_slurm`. `signals`: SIGTERM comes
    SIGNALLED_BEFORE_END_S before the time limit, in which a training saves.
    """

    name: str
    title: str
    command: Sequence[str]
    job_id: str
    host_file: str = ""
    signals: bool = False

    @abstractmethod
    def directives(self, asked: Resources) -> list[str]:
        """Comment lines at the top of the job script."""


SIGNALLED_BEFORE_END_S = 120
SHUTDOWN_TIMEOUT_VARIABLE = "MEGATRON_SHUTDOWN_TIMEOUT"  # of megatron.processes.parent_process


class Slurm(Scheduler):
    name = "slurm"
    title = "Slurm"
    command = ("sbatch", "--parsable")
    job_id = "SLURM_JOB_ID"
    signals = True

    def directives(self, asked: Resources) -> list[str]:
        options = [
            f"job-name={asked.name}", f"nodes={asked.nodes}", f"ntasks-per-node={asked.tasks}", f"time={asked.time}",
            "requeue", f"signal=SIGTERM@{SIGNALLED_BEFORE_END_S}", f"output={asked.output}/slurm-%j.out",
            "open-mode=append",
        ]  # fmt: skip
        options += [f"gpus-per-node={asked.tasks}"] if asked.gpus else []
        return [f"#SBATCH --{option}" for option in options]


class Pbs(Scheduler):
    name = "pbs"
    title = "PBS"
    command = ("qsub",)
    job_id = "PBS_JOBID"
    host_file = "PBS_NODEFILE"

    def directives(self, asked: Resources) -> list[str]:
        chunk = f"ncpus={asked.tasks}:mpiprocs={asked.tasks}" + (f":ngpus={asked.tasks}" if asked.gpus else "")
        options = [
            f"N {asked.name}", f"l select={asked.nodes}:{chunk}", "l place=scatter", f"l walltime={asked.time}", "r y",
            "j oe", f"o {asked.output}/",
        ]  # fmt: skip
        return [f"#PBS -{option}" for option in options]


SCHEDULERS = {scheduler.name: scheduler for scheduler in (Slurm(), Pbs())}
COMMANDS = " or ".join(scheduler.command[0] for scheduler in SCHEDULERS.values())


def listing_hosts(environ: Mapping[str, str]) -> Scheduler | None:
    """The scheduler whose job this is, if it lists the job's hosts in a file."""
    listing = (each for each in SCHEDULERS.values() if each.host_file)
    return next((each for each in listing if environ.get(each.job_id) and environ.get(each.host_file)), None)
