"""torchrun. One command per node; over HOSTFILE they are started through ssh."""

from __future__ import annotations

from ..places import PROGRAM
from ..run import Run
from .launch import Launch, Launcher
from .processes import launch_per_node


class Torchrun(Launcher):
    """Static rendezvous is the fastest to start, and a failed rank ends the launch."""

    def num_commands(self, run: Run) -> int:
        return run.nodes.number

    def starts_all(self, run: Run) -> bool:
        return run.nodes.number == 1 and not run.over_hosts

    def command(self, launch: Launch, node: int) -> list[str]:
        nodes = launch.run.nodes
        return [
            *launch.prefix, launch.run.interpreter.path, "-m", "torch.distributed.run",
            "--nnodes", str(nodes.number), "--node_rank", str(node), "--nproc_per_node", str(nodes.gpus_per_node),
            "--rdzv_backend", "static", "--master_addr", nodes.master_addr, "--master_port", launch.port,
            "--max_restarts", "0", PROGRAM, *launch.flags,
        ]  # fmt: skip

    def launch(self, launch: Launch) -> int:
        return launch_per_node(self, launch)
