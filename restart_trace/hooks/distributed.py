"""torch.distributed: the rendezvous and new groups of a start-up, barriers of saves and loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from restart_trace.hooks.guard import Call, wrap
from restart_trace.hooks.session import Session


def hook(session: Session, dist: ModuleType) -> None:
    """Hook torch.distributed."""

    @contextmanager
    def rendezvous(call: Call) -> Iterator[None]:
        session.open_if_rank()
        with session.startup_phase("rendezvous"):
            yield
        if dist.is_initialized():  # a program that got its rank from elsewhere than the environment
            session.open(dist.get_rank(), dist.get_world_size())

    @contextmanager
    def communicators(call: Call) -> Iterator[None]:
        with session.startup_phase("communicators"):
            yield

    @contextmanager
    def barrier(call: Call) -> Iterator[None]:
        with session.phase("barrier"):
            yield

    wrap(dist, "init_process_group", rendezvous)
    wrap(dist, "new_group", communicators)
    wrap(dist, "barrier", barrier)
    wrap(dist, "monitored_barrier", barrier)


def hook_deepspeed(session: Session, module: ModuleType) -> None:
    """Hook deepspeed.comm.torch: its backend builds an operator besides the process group."""

    @contextmanager
    def rendezvous(call: Call) -> Iterator[None]:
        with session.startup_phase("rendezvous"):
            yield

    wrap(module.TorchBackend, "__init__", rendezvous)
