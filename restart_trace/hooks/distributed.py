"""Hooks of torch.distributed: rendezvous and new groups of a start-up, barriers of saves and loads, FSDP's shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from restart_trace.hooks.coordinates import coordinates_in_groups, coordinates_in_mesh
from restart_trace.hooks.guard import Call, wrap
from restart_trace.hooks.name_lookup import time_name_lookup
from restart_trace.hooks.session import Session


def hook(session: Session, dist: ModuleType) -> None:
    """Hook torch.distributed."""

    @contextmanager
    def rendezvous(call: Call) -> Iterator[None]:
        session.open_if_rank()
        time_name_lookup(session)
        with session.startup_phase("rendezvous"):
            yield
        if dist.is_initialized():  # for a program whose rank is not in the environment
            session.open(dist.get_rank(), dist.get_world_size())

    @contextmanager
    def communicators(call: Call) -> Iterator[None]:
        # Along which axis of the layout a group lies is not known here, or not yet.
        ranks = call.arguments()["ranks"]
        over_all = ranks is None or len(ranks) == dist.get_world_size()
        with session.startup_phase("communicators", "world" if over_all else "other"):
            yield

    @contextmanager
    def barrier(call: Call) -> Iterator[None]:
        with session.phase("barrier"):
            yield

    @contextmanager
    def job_ends(call: Call) -> Iterator[None]:
        session.end_idle()
        yield

    wrap(dist, "init_process_group", rendezvous)
    wrap(dist, "destroy_process_group", job_ends)
    wrap(dist, "new_group", communicators)
    wrap(dist, "barrier", barrier)
    wrap(dist, "monitored_barrier", barrier)


def hook_fsdp(session: Session, fsdp: ModuleType) -> None:
    """Hook torch.distributed.fsdp, which knows the coordinates of a rank. Modules are sharded from the inside out."""
    import torch.distributed as dist

    @contextmanager
    def fully_shard(call: Call) -> Iterator[None]:
        yield
        given = call.arguments()
        ranks = dist.get_rank(), dist.get_world_size()
        session.record_coordinates(coordinates_in_mesh(given["mesh"], given.get("dp_mesh_dims"), *ranks))

    @contextmanager
    def wrapped(call: Call) -> Iterator[None]:
        yield
        module = call.args[0]
        replicas = getattr(module, "_inter_node_pg", None)
        strategy = module.sharding_strategy.name
        session.record_coordinates(
            coordinates_in_groups(strategy, module.process_group, replicas, dist.get_world_size())
        )

    wrap(fsdp, "fully_shard", fully_shard)
    wrap(fsdp.FullyShardedDataParallel, "__init__", wrapped)


def hook_deepspeed(session: Session, module: ModuleType) -> None:
    """Hook deepspeed.comm.torch: its backend builds an operator in addition to the process group."""

    @contextmanager
    def rendezvous(call: Call) -> Iterator[None]:
        with session.startup_phase("rendezvous"):
            yield

    wrap(module.TorchBackend, "__init__", rendezvous)
