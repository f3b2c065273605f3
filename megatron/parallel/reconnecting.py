"""Process groups that live on when their connections have ended, for in-process restarts on CPUs.

torch's process groups keep the backend that they were made with. A group here passes each collective on to a backend
that can be replaced, so that whoever holds the group, such as DeepSpeed's engine, holds it through a restart.

A group that is not connected is one that each rank makes alone: its collectives end at once and exchange nothing. So a
rank can build its engine while the others wait for it with theirs, if nothing that the engine exchanges as it is built
matters: weights, masters and moments are loaded or initialised afterwards, and what else it exchanges is for its log.

A group of all ranks, which gloo connects each with each, connects when it is first used: training hardly does. What two
ranks send to each other goes over the smallest group that has both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore, PrefixStore, ProcessGroupGloo

from megatron.processes.in_process_restart import check_not_asked, know_exchanges, shut_if_nothing_is_exchanged
from restart_trace.under_way import RANKS, UnderWay

BACKEND = "reconnecting_gloo"  # as torch and DeepSpeed know it
# What torch.distributed calls a group for, by all names that versions of torch have for it.
_PASSED_ON = re.compile("_?(all|broadcast|reduce|gather|scatter|send|recv|barrier|monitored)|_(start|end)_coalescing")
_groups: list[ReconnectingGroup] = []  # in the order of their creation, which is the same on all ranks
_works: list[dist.Work] = []  # of collectives; the last ones may go on
# gloo's thread and listening socket of this process, for all groups and starts: each takes 10 ms to end.
_devices: list[Any] = []


class ReconnectingGroup(dist.ProcessGroup):
    """A group over gloo; not connected at first. `options`: torch's, of the group that is to be made."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # pyright: ignore[reportCallIssue]  no store
        self.name_at_store = options.group_id
        self.timeout = options.timeout
        self.inner: Any = None
        self.is_connected = False
        self._connect_when_used: Callable[[], None] | None = None
        self.routes: dict[int, tuple[ReconnectingGroup, int]] = {}  # rank here -> smaller group with it, rank there
        self.disconnect()

    def connect(self, store: Any) -> None:
        """Connect with the other ranks, which meet at `store`. Alone, a rank has nobody to connect with."""
        if self.size() > 1:
            prefixed = PrefixStore(f"{self.name_at_store}/", store)
            gloo = _create_gloo(prefixed, self.rank(), self.size(), self.timeout)
            self._use(gloo, dist.ProcessGroup.BackendType.GLOO)
            self.is_connected = True

    def connect_as(self, other: ReconnectingGroup) -> None:
        """Take over the connections of a group of the same ranks in the same order, and the same timeout."""
        self.inner, self.is_connected = other.inner, other.is_connected

    def connect_when_used(self, first: ReconnectingGroup, store: Any) -> None:
        """Connect at the first collective: as `first`, which may be this one, and which all such groups connect as."""

        def connect() -> None:
            with UnderWay(RANKS, "connecting of all ranks"):
                if not first.is_connected:
                    first.connect(store)
            self.connect_as(first)

        self._connect_when_used = connect

    def used(self) -> None:
        """It is about to be used by all of its ranks."""
        if self._connect_when_used is not None:
            connect, self._connect_when_used = self._connect_when_used, None
            connect()

    def disconnect(self) -> None:
        self.is_connected, self._connect_when_used = False, None
        self.routes.clear()
        self._use(FakeProcessGroup._create_internal(self.rank(), self.size()), dist.ProcessGroup.BackendType.CUSTOM)

    def _use(self, backend: Any, kind: Any) -> None:
        inner = dist.ProcessGroup(self.rank(), self.size())  # pyright: ignore[reportCallIssue]  as above
        inner._set_default_backend(kind)
        inner._register_backend(torch.device("cpu"), kind, backend)
        self.inner = inner


def _create_gloo(store: Any, rank: int, size: int, timeout: Any) -> ProcessGroupGloo:
    if not _devices:
        first: Any = ProcessGroupGloo(store, rank, size, timeout)
        _devices.extend(first.options._devices)
        return first
    options: Any = getattr(ProcessGroupGloo, "_Options")()  # noqa: B009  types do not know it
    options._devices, options._threads, options._timeout = _devices, 2 * len(_devices), timeout  # as torch has them
    return ProcessGroupGloo(store, rank, size, options)


def _noted(group: ReconnectingGroup, work: Any) -> Any:
    if group.is_connected and isinstance(work, dist.Work):  # those that exchange nothing never complete
        _works[:] = [one for one in _works if not one.is_completed()]
        _works.append(work)
    return work


def _passed_on(name: str) -> Any:
    def collective(self: ReconnectingGroup, *args: Any, **kwargs: Any) -> Any:
        check_not_asked()
        self.used()
        return _noted(self, getattr(self.inner, name)(*args, **kwargs))

    return collective


def _passed_on_to_peer(name: str) -> Any:
    def message(self: ReconnectingGroup, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        check_not_asked()
        group, rank = self.routes.get(peer, (self, peer))
        group.used()
        return _noted(group, getattr(group.inner, name)(tensors, rank, tag))

    return message


for _name in filter(_PASSED_ON.match, vars(dist.ProcessGroup)):
    setattr(ReconnectingGroup, _name, (_passed_on_to_peer if _name in ("send", "recv") else _passed_on)(_name))


def _exchanges() -> bool:
    return not all(work.is_completed() for work in list(_works))  # a copy: the main thread adds to it


def _create(options: Any, _: Any) -> ReconnectingGroup:
    group = ReconnectingGroup(options)
    _groups.append(group)
    return group


def create_world(rank: int, world_size: int, timeout: Any) -> None:
    """Make the default group, and have those made later be of its kind; nothing if there is one that lives on."""
    if dist.is_initialized():
        return
    know_exchanges(_exchanges)
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])
    # Nobody is met there: `connect_groups` has the store of the start.
    dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=world_size, timeout=timeout)


def connect_groups(store: Any) -> None:
    """Connect all groups of this process with those of the other ranks, which meet at `store`; collective.

    The smallest come first: most of them are without the rank that is started anew, and need not wait for it. Groups
    of the same ranks share their connections. Those of all ranks connect when they are used.
    """
    firsts: dict[Any, ReconnectingGroup] = {}
    groups = sorted(_groups, key=lambda one: one.size())  # stable: the same order on all ranks
    for group in groups:
        first = firsts.setdefault((tuple(dist.get_process_group_ranks(group)), group.timeout), group)
        if group.size() == groups[-1].size():
            group.connect_when_used(first, store)
        elif first is group:
            group.connect(store)
        else:
            group.connect_as(first)
    for group in groups:
        _route(group, groups)


def _route(group: ReconnectingGroup, groups: Sequence[ReconnectingGroup]) -> None:
    """Find the smallest of `groups`, which are by size, for what is sent to each rank of `group`.

    Both ends find the same one: they are in the same groups with each other.
    """
    own = dist.get_process_group_ranks(group)
    for smaller in groups:
        if smaller.size() == group.size():
            break
        for rank, peer in enumerate(dist.get_process_group_ranks(smaller)):
            if rank != smaller.rank() and peer in own:
                group.routes.setdefault(own.index(peer), (smaller, rank))


def disconnect_groups() -> None:
    """End the connections of all groups; the groups live on."""
    shut_if_nothing_is_exchanged()
    _works.clear()
    for group in _groups:
        group.disconnect()


def forget_groups() -> None:
    """After the end of all process groups."""
    disconnect_groups()
    _groups.clear()
