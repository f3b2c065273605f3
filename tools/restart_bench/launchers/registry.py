"""The launchers by the values of LAUNCHER."""

from __future__ import annotations

from .deepspeed import DeepSpeed
from .fork import Fork
from .launch import Launcher
from .slurm_step import Srun
from .torchrun import Torchrun

LAUNCHERS: dict[str, Launcher] = {"torchrun": Torchrun(), "deepspeed": DeepSpeed(), "srun": Srun(), "fork": Fork()}
