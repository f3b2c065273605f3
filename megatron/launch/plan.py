"""The plan of a launch: the script, ranks, nodes and addresses that the command line asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.launch.etcd import StoreAddress, host_port


@dataclass(frozen=True)
class Plan:
    """The ranks of this node. If `master_port` is None, every start uses a free port (one node, or a coordinator).

    With `standby` the ranks of the next start are set up ahead of a failure, and with `standby_load` they load each
    checkpoint once it is there. With a `coordinator`, (host, port) or the etcd that has the address of the leading one,
    that decides on nodes, starts and restarts. Then `node_rank` is the number of this node, spares included, and
    `address` where other nodes reach it.
    """

    script: str
    arguments: tuple[str, ...]
    nproc_per_node: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int | None
    max_restarts: int
    shutdown_timeout_s: float
    standby: bool = False
    standby_load: bool = False
    in_process_restart: bool = False  # ranks that live after a failure start again in their processes
    return_timeout_s: float = 10.0  # how long these may take to leave the start that has failed
    # How often a process may start again before it is replaced: as often as was tried (docs/results/soak.md). Threads
    # and descriptors stay the same, and what is left of memory, 0.2 MiB a time, ends with the process.
    max_returns: int = 100
    coordinator: tuple[str, int] | StoreAddress | None = None
    address: str = ""
    bind: str | None = None  # where ports that other nodes use listen; None: at the addresses of this host's name
    secret_file: Path | None = None  # with the secret of the launch; None: the environment has it
    health_directory: str = ""  # on the disk that a health check tries
    health_interval_s: float = 60.0  # between the checks of a host that waits

    @property
    def coordinator_name(self) -> str:
        """As on the command line."""
        where = self.coordinator
        return host_port(*where) if isinstance(where, tuple) else str(where)

    @property
    def towards(self) -> str | None:
        """A host that this one reaches over the network of the launch."""
        where = self.coordinator
        return where.endpoints[0][0] if isinstance(where, StoreAddress) else None if where is None else where[0]

    @property
    def keeps_saves(self) -> bool:
        """Whether the ranks may ask for memory that outlives them: --checkpoint-engine memory, however it is spelt."""
        return any(word == "memory" or word.endswith("=memory") for word in self.arguments)

    @property
    def compiles(self) -> bool:
        """Whether the ranks compile layers."""
        return "--torch-compile" in self.arguments

    def returns_after(self, restarts: int) -> bool:
        """Whether ranks that live after a failure of the start with this number of restarts are to start again."""
        return self.in_process_restart and restarts < self.max_restarts

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    def rank(self, local_rank: int) -> int:
        """Global rank of a local one."""
        return self.node_rank * self.nproc_per_node + local_rank
