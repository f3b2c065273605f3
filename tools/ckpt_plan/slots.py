"""Host memory that saves of engine `memory` take, by arithmetic: slots of the host's own ranks and copies for others.

A run allocates exactly these sizes, and refuses to start if they are not available (docs/peers.md). No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.store.disk_space import slot_bytes
from megatron.config import ConfigError
from megatron.fileio.host_memory import available_memory, memory_limit
from megatron.peers.memory_slots import SLOTS_PER_RANK
from megatron.peers.placement import PlacementError, holders, number_of_copies

from ..common.formatting import size
from .compression import Rates, Verdict
from .compression import render as render_verdict
from .compression import to_dict as verdict_to_dict
from .presets import Planned
from .tensors import plan_tensors


@dataclass(frozen=True)
class HostMemory:
    """Bytes on the fullest host. `copies`: on how many hosts each save is copied.

    `sent_bytes`: of the copies that a host sends for one save, at most. `limit`, `available`: of this machine.
    """

    hosts: int
    ranks_per_host: int
    copies: int
    slots_bytes: int
    copies_bytes: int
    limit: int
    limit_of: str
    available: int
    sent_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.slots_bytes + self.copies_bytes

    @property
    def lack(self) -> str | None:
        """A warning, assuming that the hosts are like this machine; None if the memory is sufficient."""
        if self.num_bytes <= self.limit:
            return None
        fewer = ", lower --replicas" if self.copies > 1 else ""
        return (
            f"engine memory: {size(self.num_bytes, 2)} on a host, and {self.limit_of} of this machine is "
            f"{size(self.limit, 2)}: a host like it refuses the run; run fewer ranks on a host{fewer}, or use engine "
            "lazy"
        )


def host_memory(planned: Planned, ranks_per_host: int, *, coordinator: bool = True) -> HostMemory:
    """What a run takes, and what this machine has. Raises ConfigError for --replicas that these hosts cannot hold.

    `coordinator`: the launch has one, which hosts need to hold copies for each other. Assumes that failure domains do
    not change the replica groups.
    """
    config, layout, _ = planned
    ranks = plan_tensors(planned).ranks
    firsts = range(0, len(ranks), ranks_per_host)
    try:
        copies, _ = number_of_copies(config.checkpoint.replicas, len(firsts), served=coordinator)
    except PlacementError as exc:
        raise ConfigError(str(exc)) from exc
    each = [SLOTS_PER_RANK * slot_bytes(config, rank.parameters, layout.dp) for rank in ranks]
    own = [sum(each[first : first + ranks_per_host]) for first in firsts]
    held = [0] * len(own)
    for host, others in enumerate(holders(len(own), copies)):
        for other in others:
            held[other] += own[host]
    fullest = max(range(len(own)), key=lambda host: own[host] + held[host])
    limit, limit_of = memory_limit()
    return HostMemory(
        len(own), min(ranks_per_host, len(ranks)), copies, own[fullest], held[fullest], limit, limit_of,
        available_memory(), max(own) // SLOTS_PER_RANK * (copies - 1),
    )  # fmt: skip


def to_dict(memory: HostMemory) -> dict[str, Any]:
    """Fields of the JSON, as docs/ckpt_plan.md defines them."""
    return {
        "hosts": memory.hosts,
        "ranks_per_host": memory.ranks_per_host,
        "replicas": memory.copies,
        "host_bytes": memory.num_bytes,
        "slots_bytes": memory.slots_bytes,
        "copies_bytes": memory.copies_bytes,
        "limit_bytes": memory.limit,
        "limit_of": memory.limit_of,
        "available_bytes": memory.available,
        "lack": memory.lack,
    }


def compression(memory: HostMemory, rates: Rates) -> Verdict:
    """Of its copies. Raises ConfigError where there are none."""
    if memory.copies == 1:
        raise ConfigError(
            f"--compress-rate {rates.compress / 1e6:g}: no host holds copies for another; drop it, or plan two hosts "
            "or more with --replicas 2 and a coordinator"
        )
    return Verdict(memory.sent_bytes, memory.ranks_per_host * (memory.copies - 1), rates)


def to_json(memory: HostMemory, compressed: Verdict | None = None) -> str:
    return json.dumps(to_dict(memory) | {"compression": verdict_to_dict(compressed)}) + "\n"


def render(memory: HostMemory, compressed: Verdict | None = None) -> str:
    """Text for a terminal."""
    copies = "no copies of other hosts'"
    if memory.copies > 1:
        copies = f"{size(memory.copies_bytes, 2)} for copies of other hosts' (--replicas {memory.copies})"
    hosts = "one host" if memory.hosts == 1 else f"the fullest of {memory.hosts} hosts"
    lines = [
        f"saves in host memory, {hosts}, {memory.ranks_per_host} ranks: {size(memory.num_bytes, 2)} = "
        f"{size(memory.slots_bytes, 2)} for two slots of each rank and {copies}",
        f"this machine: {size(memory.available, 2)} are free, of at most {size(memory.limit, 2)} "
        f"({memory.limit_of}); it counts as shared memory of the job's cgroup",
    ]
    if memory.copies == 1:
        why = "one host: no other" if memory.hosts == 1 else "--replicas 1, or no coordinator: no other host"
        lines.append(f"{why} holds copies, so that a lost host is restored from --save")
    if compressed is not None:
        lines += render_verdict(compressed)
    if memory.lack is not None:
        lines.append(memory.lack)
    return "\n".join(lines) + "\n"
