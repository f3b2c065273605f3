"""The host memory in which engine `memory` keeps saves and copies of other hosts': sized, checked and taken before a
run trains. Which host holds whose copies is decided here, too."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.checkpointing.disk_space import rank_bytes, slot_bytes
from megatron.checkpointing.manager import Checkpointer
from megatron.config import CheckpointConfig, ConfigError
from megatron.fileio.host_memory import available_memory
from megatron.parallel.topology import Layout
from megatron.peers.client import Peer, ask, own_peer
from megatron.peers.placement import PlacementError, number_of_copies, place, read_domains
from megatron.peers.wire import Key, PeerError
from megatron.processes.memory_slots import SLOTS_PER_RANK
from megatron.startup.initialize import Runtime
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)

_RESERVE_S = 120.0  # seconds that the kernel may take to give all of a host's copies their pages


class Need(NamedTuple):
    """What one rank asks of its host, bytes."""

    host: str
    slots: int  # all that they are to have
    growth: int  # beyond what they have
    state: int  # that training itself is yet to take of host memory
    available: int
    each: int = 0  # of one slot
    node: int = 0  # node rank
    peer: Peer | None = None  # of its host
    held: int = 0  # what its host has for copies; 0 but on one rank of a host
    rdma: str | None = None  # what takes training's traffic past the counters that interleaved copies keep to


class Share(NamedTuple):
    """What one rank is told: who is to hold copies of its saves, and of whose its host is to hold some.

    `copies`: coordinates and bytes of one slot; empty but on one rank of a host.
    """

    peers: list[Peer]
    copies: list[tuple[Key, int]]


def reserve_slots(checkpointer: Checkpointer, runtime: Runtime, parameters: int, op: Operation) -> None:
    """Take the memory of this rank's slots, if its engine keeps saves in memory; collective.

    `op`: the start-up. Raises ConfigError on all ranks if a host does not have it.
    """
    context = checkpointer.context
    engine, config = context.checkpoint_engine, context.config
    if not engine.keeps_in_memory or config.checkpoint.save is None:
        return
    each = slot_bytes(config, parameters, runtime.layout.dp)
    need = _need(checkpointer, runtime, parameters, each)
    gathered = context.control.gather(tuple(need))
    told: tuple[str | None, list[Share]] = None, []
    if gathered is not None:
        told = _decide(config.checkpoint, runtime.layout, [Need(*one) for one in gathered])
    lack, shares = context.control.broadcast(told)
    if lack is not None:
        raise ConfigError(lack)
    share = Share(*shares[runtime.rank])
    error = None
    try:
        with op.span("host_memory", "allocate") as span:
            engine.reserve(each)
            if share.copies and need.peer is not None:
                ask(need.peer, _RESERVE_S, ask="reserve", copies=share.copies)
            span.bytes = need.growth
    except OSError as exc:
        error = f"{need.host}: {need.growth / 2**30:.2f} GiB of host memory could not be had: {exc.strerror}"
    except PeerError as exc:
        error = str(exc)
    failed = context.control.agree(error)
    if failed:
        raise ConfigError(f"--checkpoint-engine memory: rank {failed[0][0]}, {failed[0][1]}; use engine lazy")
    engine.share_with([Peer(*peer) for peer in share.peers])


def _need(checkpointer: Checkpointer, runtime: Runtime, parameters: int, each: int) -> Need:
    """Of this rank. Raises nothing: what its host's process does not answer, it has not."""
    engine, config = checkpointer.context.checkpoint_engine, checkpointer.context.config
    present = engine.slot_bytes
    # On the CPU gradients and moments come with the first step.
    state = rank_bytes(config, parameters, 0, runtime.layout.dp) if runtime.device.type == "cpu" else 0
    growth = sum(max(0, each - size) for size in present)
    slots = sum(max(each, size) for size in present)
    peer, held = own_peer(), 0
    if peer is not None and engine.options.local_rank == 0:
        try:
            held = int(ask(peer, engine.options.peer_timeout_s, ask="list")["num_bytes"])
        except PeerError as error:
            logger.warning("%s; it may hold no copies of saves", error)
    host, node = os.uname().nodename, runtime.rank // engine.options.local_world_size
    interleaves = config.checkpoint.replication_traffic == "interleave"
    rdma = rdma_device(os.environ) if interleaves and runtime.device.type == "cuda" else None
    return Need(host, slots, growth, state, available_memory(), each, node, peer, held, rdma)


def _decide(options: CheckpointConfig, layout: Layout, needs: Sequence[Need]) -> tuple[str | None, list[Share]]:
    """On rank 0: what refuses the run, or what each rank is told."""
    first = {need.node: rank for rank, need in reversed(list(enumerate(needs)))}
    nodes = sorted(first)
    hosts = [needs[first[node]].host for node in nodes]
    try:
        copies, alone = number_of_copies(options.replicas, hosts, all(need.peer is not None for need in needs))
        placed = _placed(options.failure_domain, hosts, copies)
    except PlacementError as error:
        return str(error), []
    if alone is not None:
        logger.warning("%s", alone)
    past = next((need for need in needs if need.rdma is not None), None)
    if past is not None:
        return (
            f"--replication-traffic interleave: {past.host} has {past.rdma}, and what NCCL sends by RDMA is not in the "
            "counters of network interfaces, which this flag goes by; use --replication-traffic naive, or "
            "NCCL_IB_DISABLE=1 to have NCCL use TCP"
        ), []
    shares = [Share([], []) for _ in needs]
    for rank, need in enumerate(needs):
        key: Key = (layout.tp, layout.pp, layout.dp, *layout.coordinates(rank))
        for other in placed[nodes.index(need.node)]:
            holder = first[nodes[other]]
            peer = needs[holder].peer
            assert peer is not None
            shares[rank].peers.append(Peer(*peer))
            shares[holder].copies.append((key, need.each))
    lack = lack_of_memory(needs, [SLOTS_PER_RANK * sum(size for _, size in share.copies) for share in shares])
    return lack, shares


def rdma_device(environment: Mapping[str, str], devices: Path = Path("/sys/class/infiniband")) -> str | None:
    """The device by which NCCL passes the kernel's TCP (InfiniBand, RoCE, EFA); None if there is none for it."""
    if environment.get("NCCL_IB_DISABLE") == "1" or environment.get("NCCL_NET") == "Socket":
        return None
    return next((str(device) for device in sorted(devices.glob("*"))), None)


def _placed(failure_domain: str | None, hosts: Sequence[str], copies: int) -> list[tuple[int, ...]]:
    """By host, which others hold copies of its saves. Raises PlacementError.

    After a restart a host may have taken a place that does not fit the file any more: then it is warned, not refused.
    """
    if failure_domain is None:
        return place(hosts, copies, None)
    domains = read_domains(failure_domain)
    unnamed = [host for host in hosts if host not in domains]
    try:
        if unnamed:
            raise PlacementError(
                f"--failure-domain {failure_domain}: does not name {', '.join(unnamed[:8])}; add a line HOST DOMAIN "
                "for each host, spares included"
            )
        return place(hosts, copies, domains)
    except PlacementError as error:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            raise
        logger.warning("%s. Until then two copies of a save may lie in one failure domain", error)
        return place(hosts, copies, None)


def lack_of_memory(needs: Sequence[Need], copies: Sequence[int] = ()) -> str | None:
    """What is wrong with the first host that does not have the memory for its ranks; None if all have it.

    `copies`: by rank, bytes for copies of other hosts' saves that its host is to hold.
    """
    copies = copies or [0] * len(needs)
    for host in dict.fromkeys(need.host for need in needs):
        mine = [(need, extra) for need, extra in zip(needs, copies, strict=True) if need.host == host]
        others = sum(extra for _, extra in mine)
        growth = sum(need.growth for need, _ in mine) + sum(max(0, extra - need.held) for need, extra in mine)
        state = sum(need.state for need, _ in mine)
        available = min(need.available for need, _ in mine)
        if growth + state > available:
            besides = f", beside {state / 2**30:.2f} GiB that training is yet to take," if state else ""
            held = f", and copies of other hosts' in {others / 2**30:.2f} GiB" if others else ""
            fewer = " or lower --replicas," if others else ""
            return (
                f"--checkpoint-engine memory: {host} keeps {len(mine)} ranks' saves in "
                f"{sum(need.slots for need, _ in mine) / 2**30:.2f} GiB of host memory (two slots each){held}; "
                f"{growth / 2**30:.2f} GiB are yet to be had{besides} and {available / 2**30:.2f} GiB are free (of the "
                f"host, or of a limit of its cgroups); run fewer ranks on a host,{fewer} "
                "or use --checkpoint-engine lazy"
            )
    return None
