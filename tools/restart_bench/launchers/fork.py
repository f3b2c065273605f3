"""megatron.launch, which imports once for all ranks of a node. One command per node, started as those of torchrun.

Over HOSTFILE with MAX_RESTARTS a coordinator on this host decides which nodes train, and starts all ranks again when
one fails or a node is lost. Hosts beyond those that the layout takes are spares (SPARES: how many of them).
"""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..places import PROGRAM, ROOT
from ..run import Run
from .launch import Launch, Launcher
from .processes import Processes, carrying_user_env, launch_per_node, processes

_LAUNCHER = str(ROOT / "megatron" / "launch")
_POLL_S = 0.02


@dataclass(frozen=True)
class Fork(Launcher):
    """`coordinator`: its address and port, where they are known; `port_file`: where the coordinator writes its port."""

    coordinator: str = ""
    port_file: str = ""

    def num_commands(self, run: Run) -> int:
        return run.nodes.used + (1 if run.coordinates else 0)

    def starts_all(self, run: Run) -> bool:
        return run.nodes.number == 1 and not run.over_hosts

    def command(self, launch: Launch, node: int) -> list[str]:
        run, given, nodes = launch.run, launch.run.given, launch.run.nodes
        if node == nodes.used:
            return self._coordinate(launch)
        if run.coordinates:
            address = self.coordinator or f"{nodes.coordinator_addr}:PORT"
            words = ["--coordinator", address, "--node-rank", str(node), "--address", nodes.hosts.names[node]]
            words += ["--master-port", launch.master_port] if launch.master_port else []
        else:
            words = ["--master-addr", nodes.master_addr, "--nnodes", str(nodes.number), "--node-rank", str(node)]
            words += ["--max-restarts", given.max_restarts or "0"]
            words += ["--standby"] if given.standby else []
            words += ["--standby-load"] if given.standby == "load" else []
            words += ["--master-port", launch.port] if nodes.number > 1 or launch.master_port else []
        words += ["--in-process-restart"] if given.in_process_restart else []
        return [
            *launch.prefix, run.interpreter.path, _LAUNCHER, "--nproc-per-node", str(nodes.gpus_per_node), *words,
            PROGRAM, *launch.flags,
        ]  # fmt: skip

    def _coordinate(self, launch: Launch) -> list[str]:
        given, nodes = launch.run.given, launch.run.nodes
        return [
            "env", *launch.environment, launch.run.interpreter.path, _LAUNCHER, "coordinate",
            "--nnodes", str(nodes.number), "--spares", str(nodes.spares), "--nproc-per-node", str(nodes.gpus_per_node),
            "--max-restarts", given.max_restarts or "0", "--heartbeat-timeout", given.heartbeat_timeout or "2",
            *(["--allow-shrink"] if given.allow_shrink else []),
            "--address", nodes.coordinator_addr,
            *(["--port", given.coordinator_port] if given.coordinator_port else []),
            *(["--port-file", self.port_file] if self.port_file else []),
            PROGRAM, *launch.flags,
        ]  # fmt: skip

    def launch(self, launch: Launch) -> int:
        return _launch_with_coordinator(launch) if launch.run.coordinates else launch_per_node(self, launch)


def _launch_with_coordinator(launch: Launch) -> int:
    """The coordinator decides the exit status of the launch: lost nodes are its business."""
    import tempfile  # most launches do not wait for it

    nodes = launch.run.nodes
    with processes() as mine, tempfile.TemporaryDirectory() as directory:
        launch = carrying_user_env(launch, mine)
        port_file = Path(directory) / "port"
        words = Fork(port_file=str(port_file)).command(launch, nodes.used)
        coordinator = mine.start(words, launch, leads=True)
        while not port_file.exists():
            if (ended := mine.wait_for_one(_POLL_S)) is not None:
                return ended[1]
        launcher = Fork(coordinator=f"{nodes.coordinator_addr}:{port_file.read_text().strip()}")
        for node in range(nodes.used):
            mine.start_node(launcher, launch, node)
        return _status_of_coordinator(coordinator, mine)
    raise AssertionError("a signal that ends the block ends this process")


def _status_of_coordinator(coordinator: subprocess.Popen[bytes], mine: Processes) -> int:
    """SIGUSR1 tells the coordinator that a node's command failed before all had joined; later it notices by itself."""
    while (ended := mine.wait_for_one()) is not None:
        process, status = ended
        if process is coordinator:
            return status
        if status != 0:
            os.kill(coordinator.pid, signal.SIGUSR1)
    raise AssertionError("the coordinator is one of them")
