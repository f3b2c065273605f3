"""Cells that need the same nodes share an allocation: one after the other, in one job of Slurm."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..common.sweep_files import Cell
from ..restart_bench.environment import for_shell_line
from ..restart_bench.launcher_entries import BY_SLURM
from ..restart_bench.settings import whole_number
from ..restart_drill.faults import ON_NODES
from .commands import LAUNCHED, PACKAGE
from .directory import SweepError

_GPUS_PER_NODE = 8
_STOPPED_BEFORE_END_S = 60  # so that the cell that runs then ends its ranks, and removes what it wrote
_REPORT_S = 600


@dataclass(frozen=True)
class Allocation:
    """Nodes with so many GPUs each, and the cells that need them. `tasks`: processes that a node has room for."""

    nodes: int
    gpus: int
    tasks: int
    cells: list[Cell]

    @property
    def name(self) -> str:
        """As 8x4: nodes x GPUs of each."""
        return f"{self.nodes}x{self.gpus}"

    def most_hours(self, time_limit_s: float) -> float:
        return len(self.cells) * time_limit_s / 3600

    def most_gpu_hours(self, time_limit_s: float) -> float:
        return self.nodes * self.gpus * self.most_hours(time_limit_s)


def allocations_of(cells: Sequence[Cell], environ: Mapping[str, str] = os.environ) -> list[Allocation]:
    """The allocations in which all cells can run, the smallest first.

    Trainings need nodes of GPUS_PER_NODE GPUs (default: 8), or of as many CPU ranks with DEVICE=cpu. Replays, scaled
    trainings and the storage itself run on one node without GPUs. Raises SweepError.
    """
    given = environ.get("GPUS_PER_NODE") or str(_GPUS_PER_NODE)
    if (wrong := whole_number(given)) is not None:
        raise SweepError(f"GPUS_PER_NODE={given}: {wrong}")
    per_node = int(given)
    gpus = 0 if environ.get("DEVICE") == "cpu" else per_node
    found: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        launched = cell.mode in LAUNCHED
        key = (math.ceil(cell.ranks / per_node), gpus) if launched else (1, 0)
        found.setdefault(key, []).append(cell)
    return [Allocation(*key, per_node, of) for key, of in sorted(found.items())]


def named(name: str, cells: Sequence[Cell]) -> Allocation:
    """The allocation of --allocation. Raises SweepError if no cell needs it."""
    there = allocations_of(cells)
    found = next((each for each in there if each.name == name), None)
    if found is None:
        raise SweepError(
            f"--allocation {name}: no cell needs it; there are {', '.join(each.name for each in there)} (nodes x GPUs)"
        )
    return found


def check_submitted(cells: Sequence[Cell], environ: Mapping[str, str] = os.environ) -> None:
    """Raises SweepError for cells or settings with which srun cannot start the ranks of a job."""
    launcher = environ.get("LAUNCHER", "")
    if launcher not in ("", *BY_SLURM):
        raise SweepError(f"LAUNCHER={launcher}: in a job of --submit srun starts the ranks; leave it out")
    if environ.get("HOSTFILE"):
        raise SweepError("HOSTFILE: a job of --submit runs on the hosts that Slurm allocates; leave it out")
    for cell in cells:
        if cell.mode not in LAUNCHED:
            continue
        if cell.fault.partition("@")[0] in ON_NODES:
            raise SweepError(f"--submit: {cell.fault} needs hosts of HOSTFILE and spares; run these cells without it")
        if (given := cell.settings.get("launcher", "")) not in ("", *BY_SLURM):
            raise SweepError(
                f"--submit: the file has launcher: {given}, and in a job srun starts the ranks; leave it out"
            )


def submission(
    allocation: Allocation, sweep_words: Sequence[str], log: str, name: str, time_limit_s: float, options: Sequence[str]
) -> list[str]:
    """The sbatch command of an allocation. Jobs of one sweep wait for each other: they would share the storage.

    `sweep_words`: arguments of restart-sweep; `log`: of the jobs; `options`: of sbatch.
    """
    launched = any(cell.mode in LAUNCHED for cell in allocation.cells)
    settings = [f"GPUS_PER_NODE={allocation.tasks}", *(["LAUNCHER=srun"] if launched else [])]
    program = [sys.executable, "-m", f"{PACKAGE}.restart_sweep", *sweep_words, "--allocation", allocation.name]
    seconds = math.ceil(len(allocation.cells) * time_limit_s) + _REPORT_S
    asked = [
        f"--job-name={name}", "--dependency=singleton", f"--nodes={allocation.nodes}",
        f"--ntasks-per-node={allocation.tasks}", *([f"--gpus-per-node={allocation.gpus}"] if allocation.gpus else []),
        f"--time={seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}", "--requeue", "--open-mode=append",
        f"--signal=B:TERM@{_STOPPED_BEFORE_END_S}", f"--output={log}",
    ]  # fmt: skip
    return ["sbatch", "--parsable", *asked, *options, f"--wrap=exec env {shlex.join([*settings, *program])}"]


def submit(commands: Sequence[Sequence[str]]) -> Iterator[str]:
    """Hand over the jobs; yields each when it is, as sbatch prints it: NUMBER or NUMBER;CLUSTER.

    Raises SweepError with what sbatch said.
    """
    if shutil.which("sbatch") is None:
        raise SweepError("--submit: sbatch is not on PATH; submit where it is, or add --dry-run to see the jobs")
    numbers: list[str] = []
    for command in commands:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode != 0:
            before = f"; submitted before: {', '.join(numbers)}" if numbers else ""
            raise SweepError(f"sbatch refused {for_shell_line(command)}: {done.stderr.strip()}{before}")
        job = done.stdout.strip()
        numbers.append(job.partition(";")[0])
        yield job
