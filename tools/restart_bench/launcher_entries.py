"""The launchers by the values of LAUNCHER. Naming them imports none, so that settings and sweeps know them, too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LauncherEntry:
    """Where a launcher is: `module` of the package `launchers`. `meaning`: Markdown of docs/cluster.md."""

    module: str
    class_name: str
    meaning: str


LAUNCHERS = {
    "torchrun": LauncherEntry("torchrun", "Torchrun", "`torchrun`"),
    "deepspeed": LauncherEntry("deepspeed", "DeepSpeed", "`deepspeed`"),
    "srun": LauncherEntry("slurm_step", "Srun", "`srun` within a Slurm allocation"),
    "fork": LauncherEntry("fork", "Fork", "`fork`: [megatron.launch](launch.md)"),
}
