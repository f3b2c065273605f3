"""The launchers by the values of LAUNCHER. Naming them imports none, so that settings and sweeps know them, too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LauncherEntry:
    """Where a launcher is, and what it does otherwise than others. A launcher with none of the marks has a command for
    each node, which is started through ssh or by hand.

    `module`: of the package `launchers`. `meaning`: Markdown, links as in docs/. `by_slurm`: Slurm starts the ranks, on
    the hosts of an allocation. `from_one_node`: its own command starts the ranks of all hosts of HOSTFILE, which it
    reads itself, and carries their variables. `in_place`: starts ranks again in place, on spare hosts, too, and holds
    the memory of engine `memory`. `free_port`: on one node it gets a free port for the rendezvous.
    """

    module: str
    class_name: str
    meaning: str
    by_slurm: bool = False
    from_one_node: bool = False
    in_place: bool = False
    free_port: bool = False


LAUNCHERS = {
    "torchrun": LauncherEntry("torchrun", "Torchrun", "`torchrun`", free_port=True),
    "deepspeed": LauncherEntry("deepspeed", "DeepSpeed", "`deepspeed`", from_one_node=True, free_port=True),
    "srun": LauncherEntry("slurm_step", "Srun", "`srun` within a Slurm allocation", by_slurm=True),
    "fork": LauncherEntry("fork", "Fork", "`fork`: [megatron.launch](launch.md)", in_place=True),
}
BY_SLURM = tuple(name for name, entry in LAUNCHERS.items() if entry.by_slurm)
FROM_ONE_NODE = tuple(name for name, entry in LAUNCHERS.items() if entry.from_one_node)
IN_PLACE = tuple(name for name, entry in LAUNCHERS.items() if entry.in_place)
FREE_PORT = tuple(name for name, entry in LAUNCHERS.items() if entry.free_port)
ON_EACH_NODE = tuple(name for name in LAUNCHERS if name not in (*BY_SLURM, *FROM_ONE_NODE))


def setting_of(launchers: tuple[str, ...]) -> str:
    """The setting that asks for one of them: LAUNCHER=a or b."""
    return f"LAUNCHER={' or '.join(launchers)}"
