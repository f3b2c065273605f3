"""Measures how long each kind of process group takes to create, and connects all of them before the first step.

A group that was created is not always connected (docs/metrics.md says what each backend leaves for later). With
--warmup-communicators, `connect_all` runs on every group what a training step runs on it, and sends between
neighbouring pipeline stages in both directions, so that the first step finds everything connected.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from megatron.config import ConfigError
from megatron.parallel.accelerator import accelerator
from megatron.parallel.control_plane import ControlPlane, control_planes
from megatron.parallel.topology import Layout
from restart_trace.startup import Startup
from restart_trace.under_way import RANKS, UnderWay

# NCCL chooses its algorithm by the size of the whole collective, for an all-gather that of all parts together
# (ncclFuncMaxSendRecvCount in its src/enqueue.cc), and connects each when it is first used: one for latency, one for
# bandwidth. A size for each rank's part would allocate in proportion to the ranks: 16 GiB of bf16 at 1,024.
_ELEMENTS = (1, 8 << 20)  # of bf16 or fp32


def kind_of(ranks: Sequence[int], layout: Layout) -> str:
    """What a group of these global ranks connects: one of restart_trace.schema.GROUPS but `control`."""
    if len(ranks) == 1:
        return "other"
    if len(ranks) == layout.world_size:
        return "world"
    places = [layout.coordinates(rank) for rank in ranks]
    differing = tuple(axis for axis in ("tp", "pp", "dp") if len({getattr(place, axis) for place in places}) > 1)
    names = {("tp",): "tensor", ("pp",): "pipeline", ("dp",): "data", ("tp", "pp"): "model"}
    return names.get(differing, "other")


class Sizes(NamedTuple):
    """Elements of the collectives that connect one algorithm of a group."""

    reduced: int  # tensor of an all-reduce or a broadcast
    part: int  # each rank's part of an all-gather or a reduce-scatter
    gathered: int  # all parts


def collective_sizes(ranks: int) -> list[Sizes]:
    """The sizes that connect a group of `ranks`: the smallest, and 8 Mi elements or little less however many ranks."""
    parts = [(elements, max(1, elements // ranks)) for elements in _ELEMENTS]
    return [Sizes(elements, part, part * ranks) for elements, part in parts]


class Communicators:
    """The process groups that this rank creates during its start, and how long that takes."""

    def __init__(self, startup: Startup, layout: Layout, timeout: datetime.timedelta) -> None:
        """`timeout`: how long operations of a group wait whose creator does not say; new_group would say 10 minutes
        (NCCL) or 30 (gloo), whatever the default group has.
        """
        self.startup = startup
        self._layout = layout
        self._timeout = timeout
        self._store: Any = None  # torch.distributed.Store, where the ranks of this start meet
        self.groups: list[tuple[str, Any]] = []  # kind and group, of those that this rank is in, by creation

    def control_planes(self, store: Any, rank: int, number: int) -> list[ControlPlane]:
        """For agreements of all ranks on the host, each for a thread of its own. Collective; they meet at `store`.

        Raises ConfigError if the other ranks have no address to reach this one, AgreementLostError if they cannot.
        """
        self._store = store
        seconds = self._timeout.total_seconds()
        with self.startup.phase("communicators", "control"), UnderWay(RANKS, "connecting of all ranks"):
            try:
                return control_planes(store, rank, self._layout.world_size, number, seconds)
            except ValueError as error:
                raise ConfigError(str(error)) from error

    @contextmanager
    def apart_from(self, phase: str) -> Iterator[None]:
        """Measure a phase of the start-up in which DeepSpeed also creates groups and builds its operators.

        Those count as `communicators` and `compile`.
        """
        import torch.distributed as dist
        from deepspeed.ops.op_builder.builder import OpBuilder

        operators: Any = OpBuilder
        create, build = dist.new_group, operators.jit_load
        with self.startup.phase_around(phase, RANKS) as inner:

            def timed(ranks: Any = None, timeout_given: Any = None, *args: Any, **kwargs: Any) -> Any:
                chosen = timeout_given or kwargs.pop("timeout", None) or self._timeout
                kind = "world" if ranks is None else kind_of(list(ranks), self._layout)
                with inner.phase("communicators", kind):
                    return self._keep(kind, create(ranks, chosen, *args, **kwargs))

            def timed_build(builder: Any, *args: Any, **kwargs: Any) -> Any:
                with inner.phase("compile"):
                    return build(builder, *args, **kwargs)

            dist.new_group, operators.jit_load = timed, timed_build
            try:
                yield
            finally:
                dist.new_group, operators.jit_load = create, build

    def reconnect(self) -> None:
        """Connect the groups that were made without (--in-process-restart). Collective."""
        from megatron.parallel.reconnecting import connect_groups

        with self.startup.phase("communicators", "world"), UnderWay(RANKS, "connecting of all ranks"):
            connect_groups(self._store)

    def connect_all(self, rank: int, device: Any, dtype: Any, exchanging: Collection[int] = ()) -> None:
        """Connect the default group, every group created so far and the neighbouring stages. Collective.

        Groups of data-parallel ranks of the sizes `exchanging` also exchange parts of sequences, or tokens.

        All ranks go through the groups in the order of their creation, which is the same on all: a rank waits in a
        group only for ranks that are on their way to it. The device is synchronised after each, so that the spans of
        `warmup` hold what the device did.
        """
        import torch.distributed as dist

        if self._layout.world_size == 1:
            return
        for kind, group in [("world", None), *self.groups]:
            with self.startup.phase("warmup", kind), UnderWay(RANKS, "connecting of process groups"):
                exchanges = kind == "data" and dist.get_world_size(group) in exchanging
                _use(group, device, dtype, exchanges)
                accelerator().synchronize()
        if self._layout.pp > 1:
            with self.startup.phase("warmup", "point_to_point"), UnderWay(RANKS, "connecting of stages"):
                _exchange_with_neighbours(rank, self._layout, device)
                accelerator().synchronize()

    def _keep(self, kind: str, group: Any) -> Any:
        import torch.distributed as dist

        if group is not dist.GroupMember.NON_GROUP_MEMBER and dist.get_world_size(group) > 1:
            self.groups.append((kind, group))
        return group


def _use(group: Any, device: Any, dtype: Any, exchanges: bool) -> None:
    """The collectives of a training step on `group` (None: the default one), small and large.

    `exchanges`: an all-to-all, too, for which NCCL connects all pairs of ranks.
    """
    import torch
    import torch.distributed as dist

    from megatron.parallel.reconnecting import BACKEND

    on_gloo = dist.get_backend(group) in ("gloo", BACKEND)
    root = dist.get_global_rank(group, 0) if group is not None else 0
    for size in collective_sizes(dist.get_world_size(group))[: 1 if on_gloo else None]:
        part = torch.zeros(size.part, dtype=dtype, device=device)
        whole = torch.zeros(max(size.reduced, size.gathered), dtype=dtype, device=device)
        reduced, gathered = whole[: size.reduced], whole[: size.gathered]
        dist.all_reduce(reduced, group=group)
        dist.broadcast(reduced, src=root, group=group)
        dist.all_gather_into_tensor(gathered, part, group=group)
        dist.reduce_scatter_tensor(part, gathered, group=group)
        if on_gloo or exchanges:  # gloo connects pairs of ranks: every pair
            dist.all_to_all_single(gathered, torch.zeros_like(gathered), group=group)


def _exchange_with_neighbours(rank: int, layout: Layout, device: Any) -> None:
    """Send to and receive from both neighbouring stages over the default group, as DeepSpeed's pipeline does.

    Even stages send first, odd ones receive first, so that no two wait for each other.
    """
    import torch
    import torch.distributed as dist

    place = layout.coordinates(rank)
    message = torch.zeros(1, device=device)

    def send(stage: int) -> None:
        if 0 <= stage < layout.pp:
            dist.send(message, layout.rank(place.tp, stage, place.dp))

    def receive(stage: int) -> None:
        if 0 <= stage < layout.pp:
            dist.recv(message, layout.rank(place.tp, stage, place.dp))

    for onward in (1, -1):  # activations, then gradients
        steps: tuple[Callable[[int], None], ...] = (send, receive) if place.pp % 2 == 0 else (receive, send)
        for step in steps:
            step(place.pp + (onward if step is send else -onward))
