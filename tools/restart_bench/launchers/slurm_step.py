"""Slurm's srun, within an allocation. One command, one task per rank."""

from __future__ import annotations

from ..interpreter import replace_process
from ..places import PROGRAM
from ..run import Run
from .launch import Launch, Launcher, with_secret


def srun_shape(run: Run) -> list[str]:
    """The nodes and tasks of a step with a task for each rank."""
    nodes = run.nodes
    return [
        "--nodes", str(nodes.number), "--ntasks", str(run.layout.world_size),
        "--ntasks-per-node", str(nodes.gpus_per_node), "--export=ALL",
    ]  # fmt: skip


class Srun(Launcher):
    """Slurm numbers the tasks; a rank that fails ends the step."""

    def num_commands(self, run: Run) -> int:
        return 1

    def starts_all(self, run: Run) -> bool:
        return True

    def command(self, launch: Launch, node: int) -> list[str]:
        run, nodes = launch.run, launch.run.nodes
        return [
            *launch.prefix, f"MASTER_ADDR={nodes.master_addr}", f"MASTER_PORT={launch.port}",
            f"WORLD_SIZE={run.layout.world_size}", f"LOCAL_WORLD_SIZE={nodes.gpus_per_node}",
            "srun", *srun_shape(run), "--kill-on-bad-exit=1", "--unbuffered",
            "bash", "-c", 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"', "rank",
            run.interpreter.path, PROGRAM, *launch.flags,
        ]  # fmt: skip

    def launch(self, launch: Launch) -> int:
        launch = with_secret(launch)
        replace_process(self.command(launch, 0), launch.run.environ)
