"""The host memory for saves of engine `memory` and for copies of other hosts' saves: sized, checked and allocated.

This is done before a run trains, and includes the decision which host holds copies of which host's saves.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.checkpointing.manager import Checkpointer
from megatron.checkpointing.store.disk_space import moment_bytes, slot_bytes, weight_bytes
from megatron.config import CheckpointConfig, Config, ConfigError
from megatron.fileio.host_memory import available_memory
from megatron.parallel.topology import Layout
from megatron.peers.client import Peer, ask, own_peer
from megatron.peers.memory_slots import SLOTS_PER_RANK
from megatron.peers.placement import PlacementError, number_of_copies, place, read_domains
from megatron.peers.rdma import ports_of_nccl
from megatron.peers.wire import Key, PeerError
from megatron.startup.initialize import Runtime
from restart_trace.cycles import is_restart_in_place
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)

_RESERVE_S = 120.0  # seconds that the kernel may take to allocate the pages of all copies of a host


class Need(NamedTuple):
    """The host memory that one rank needs, in bytes."""

    host: str
    slots: int  # total size of its slots
    growth: int  # part of it that is not allocated yet
    state: int  # host memory that training itself will still allocate
    available: int
    each: int = 0  # size of one slot
    node: int = 0  # node rank
    peer: Peer | None = None  # the process of its host
    held: int = 0  # memory that its host has allocated for copies; 0 except on one rank of a host
    uncounted: str | None = None  # RDMA port that NCCL uses and that does not count what it carries


class Share(NamedTuple):
    """The result for one rank: the peers that hold copies of its saves, and the copies that its host holds.

    `copies`: coordinates and bytes of one slot; empty except on one rank of a host.
    """

    peers: list[Peer]
    copies: list[tuple[Key, int]]


def reserve_slots(
    checkpointer: Checkpointer, runtime: Runtime, parameters: int, optimizer: torch.optim.Optimizer, op: Operation
) -> None:
    """Allocate the slots of this rank, if its engine keeps saves in memory; collective.

    `optimizer`: its own, with what was loaded. `op`: the start-up. Raises ConfigError on all ranks if a host has not
    enough memory.
    """
    context = checkpointer.context
    engine, config = context.checkpoint_engine, context.config
    if not engine.keeps_in_memory or config.checkpoint.save is None:
        return
    each = slot_bytes(config, parameters, runtime.layout.dp)
    moments = moments_in_host_memory(optimizer)
    state = state_bytes(config, runtime.device.type, parameters, runtime.layout.dp, moments)
    need = _need(checkpointer, runtime, state, each)
    gathered = context.control.gather(tuple(need))
    decision: tuple[str | None, list[Share]] = None, []
    if gathered is not None:
        decision = _decide(config.checkpoint, runtime.layout, [Need(*one) for one in gathered])
    lack, shares = context.control.broadcast(decision)
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
        error = f"{need.host}: {need.growth / 2**30:.2f} GiB of host memory could not be allocated: {exc.strerror}"
    except PeerError as exc:
        error = str(exc)
    failed = context.control.agree(error)
    if failed:
        raise ConfigError(f"--checkpoint-engine memory: rank {failed[0][0]}, {failed[0][1]}; use engine lazy")
    engine.share_with([Peer(*peer) for peer in share.peers])


def _need(checkpointer: Checkpointer, runtime: Runtime, state: int, each: int) -> Need:
    """The need of this rank. `state`: as of state_bytes.

    If its host's process does not answer, it counts as holding no copies.
    """
    engine, config = checkpointer.context.checkpoint_engine, checkpointer.context.config
    present = engine.slot_bytes
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
    ports = ports_of_nccl(os.environ) if interleaves and runtime.backend == "nccl" else []
    uncounted = next((str(port.directory) for port in ports if port.files is None), None)
    return Need(host, slots, growth, state, available_memory(), each, node, peer, held, uncounted)


def moments_in_host_memory(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what the optimizer has of its parameters in host memory: none before the first step, unless loaded."""
    values = (value for of_one in optimizer.state.values() for value in of_one.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.device.type == "cpu")


def state_bytes(config: Config, device_type: str, parameters: int, dp_size: int, moments_present: int) -> int:
    """Host memory that training takes in its first step, bytes, beyond what it has by then.

    That is the moments, unless they are there (`moments_present`, bytes), as after a load; and on the CPU the
    gradients, with this rank's shard of them in fp32. DeepSpeed has the master weights before, and with --cpu-optimizer
    that shard, too (DeepSpeedZeroOptimizer.initialize_optimizer_states).
    """
    offloads = config.optimizer.cpu_optimizer
    if device_type != "cpu" and not offloads:
        return 0
    moments = max(0, -(-parameters * moment_bytes(config) // dp_size) - moments_present)
    if device_type != "cpu":
        return moments
    return moments + parameters * weight_bytes(config) + (0 if offloads else -(-parameters * 4 // dp_size))


def _decide(options: CheckpointConfig, layout: Layout, needs: Sequence[Need]) -> tuple[str | None, list[Share]]:
    """On rank 0: why the run is refused, or None and the Share of each rank."""
    first = {need.node: rank for rank, need in reversed(list(enumerate(needs)))}
    nodes = sorted(first)
    hosts = [needs[first[node]].host for node in nodes]
    try:
        placed = _placed(options, hosts, all(need.peer is not None for need in needs))
    except PlacementError as error:
        return str(error), []
    past = next((need for need in needs if need.uncounted is not None), None)
    if past is not None:
        return (
            f"--replication-traffic interleave: {past.uncounted} of {past.host} has no counters that can be read, so "
            "nobody can tell when NCCL leaves it idle; use --replication-traffic naive, exclude it by NCCL_IB_HCA, or "
            "make NCCL use TCP (NCCL_NET=Socket)"
        ), []
    shares = [Share([], []) for _ in needs]
    others = dict(zip(nodes, placed, strict=True))
    for rank, need in enumerate(needs):
        key: Key = (layout.tp, layout.pp, layout.dp, *layout.coordinates(rank))
        for other in others[need.node]:
            holder = first[nodes[other]]
            peer = needs[holder].peer
            assert peer is not None
            shares[rank].peers.append(Peer(*peer))
            shares[holder].copies.append((key, need.each))
    lack = lack_of_memory(needs, [SLOTS_PER_RANK * sum(size for _, size in share.copies) for share in shares])
    return lack, shares


def _placed(options: CheckpointConfig, hosts: Sequence[str], served: bool) -> list[tuple[int, ...]]:
    """By host, which others hold copies of its saves. `served`: as of number_of_copies. Raises PlacementError.

    After a restart there may be fewer hosts, or a host may have a place that no longer fits the file: then this
    warns instead of refusing.
    """
    restarted, asked = is_restart_in_place(os.environ), options.replicas
    if restarted and asked is not None and asked > len(hosts):
        logger.warning("--replicas %d: only %d hosts are left, so there are only as many copies", asked, len(hosts))
        asked = len(hosts)
    copies, alone = number_of_copies(asked, len(hosts), served)
    if alone is not None:
        logger.warning("%s", alone)
    if options.failure_domain is None:
        return place(hosts, copies, None)
    try:
        return place(hosts, copies, _domains_of(hosts, options.failure_domain))
    except PlacementError as error:
        if not restarted:
            raise
        logger.warning("%s. Until then two copies of a save may lie in one failure domain", error)
        return place(hosts, copies, None)


def _domains_of(hosts: Sequence[str], path: str) -> dict[str, str]:
    """What the file says of these hosts. Raises PlacementError, also if it does not name one of them."""
    domains = read_domains(path)
    unnamed = [host for host in hosts if host not in domains]
    if unnamed:
        raise PlacementError(
            f"--failure-domain {path}: does not name {', '.join(unnamed[:8])}; add a line HOST DOMAIN for each host, "
            "spares included"
        )
    return domains


def lack_of_memory(needs: Sequence[Need], copies: Sequence[int] = ()) -> str | None:
    """A message about the first host that has not enough memory for its ranks; None if all have enough.

    `copies`: by rank, bytes for copies of other hosts' saves that its host holds.
    """
    copies = copies or [0] * len(needs)
    by_host: dict[str, list[tuple[Need, int]]] = {}  # in one pass: rank 0 does this for all, while they wait
    for need, extra in zip(needs, copies, strict=True):
        by_host.setdefault(need.host, []).append((need, extra))
    for host, mine in by_host.items():
        others = sum(extra for _, extra in mine)
        growth = sum(need.growth for need, _ in mine) + sum(max(0, extra - need.held) for need, extra in mine)
        state = sum(need.state for need, _ in mine)
        available = min(need.available for need, _ in mine)
        if growth + state > available:
            besides = f", in addition to {state / 2**30:.2f} GiB for training itself," if state else ""
            held = f", and copies of other hosts' saves in {others / 2**30:.2f} GiB" if others else ""
            fewer = " or lower --replicas," if others else ""
            return (
                f"--checkpoint-engine memory: {host} keeps {len(mine)} ranks' saves in "
                f"{sum(need.slots for need, _ in mine) / 2**30:.2f} GiB of host memory (two slots each){held}; "
                f"{growth / 2**30:.2f} GiB must still be allocated{besides} and {available / 2**30:.2f} GiB are free "
                f"(of the host, or of a limit of its cgroups); run fewer ranks on a host,{fewer} "
                "or use --checkpoint-engine lazy"
            )
    return None
