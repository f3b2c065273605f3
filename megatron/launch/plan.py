"""What the launcher starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The ranks of this node. If `master_port` is None, every start uses a free port (one node only)."""

    script: str
    arguments: tuple[str, ...]
    nproc_per_node: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int | None
    max_restarts: int
    shutdown_timeout_s: float

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    def rank(self, local_rank: int) -> int:
        """Global rank of a local one."""
        return self.node_rank * self.nproc_per_node + local_rank
