"""Experts that are divided over data-parallel ranks, and the exchange of their tokens.

Neighbouring data-parallel ranks hold a part of a layer's experts each (an expert-parallel group), and so do the next
ones, with the same parts: the ranks with the same part reduce its gradients and divide its optimizer state (an
expert-data-parallel group). The names and the order of the ranks are DeepSpeed's (deepspeed/utils/groups.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.mappings import exchange_parts
from megatron.parallel.topology import Layout


@dataclass
class ExpertParallelGroup:
    """Rank and size within the group that the experts of a layer are divided over.

    `group` and `replicas` (torch.distributed.ProcessGroup): that group, and the ranks with the same experts, once they
    exist.
    """

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, repr=False)
    replicas: Any = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """DeepSpeed's, of the process groups and of the optimizer's groups of parameters."""
        return f"ep_size_{self.size}"

    def held(self, experts: int) -> range:
        """The experts that this rank holds of a layer with so many."""
        each = experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def mark(self, parameter: torch.nn.Parameter, expert: int) -> None:
        """Mark `parameter` as belonging to expert number `expert` of its layer, for DeepSpeed and for checkpoints."""
        if self.size > 1:
            parameter.allreduce, parameter.group_name = False, self.name  # type: ignore[attr-defined]
            parameter.divided_expert = DividedExpert(expert, self.size)  # type: ignore[attr-defined]

    def largest(self, count: torch.Tensor) -> int:
        """The largest of the `count` of each rank of the group."""
        if self.size > 1:
            dist.all_reduce(count, op=dist.ReduceOp.MAX, group=self.group)
        return int(count)

    def norm(self, tensors: Sequence[torch.Tensor], device: Any) -> torch.Tensor:
        """L2 norm of the tensors of all ranks of the group, fp32; collective over these."""
        squares = torch.zeros(1, device=device)
        for tensor in tensors:
            squares += torch.linalg.vector_norm(tensor, dtype=torch.float32) ** 2
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()

    def to_experts(self, slots: torch.Tensor) -> torch.Tensor:
        """[experts, capacity, hidden] of each rank, sent to where the experts are: [held, ranks x capacity, hidden]."""
        if self.size == 1:
            return slots
        received = exchange_parts(slots.unflatten(0, (self.size, -1)), self.group)
        return received.transpose(0, 1).flatten(1, 2)

    def from_experts(self, found: torch.Tensor) -> torch.Tensor:
        """The way back of `to_experts`."""
        if self.size == 1:
            return found
        return exchange_parts(found.unflatten(1, (self.size, -1)).transpose(0, 1), self.group).flatten(0, 1)


@dataclass(frozen=True)
class DividedExpert:
    """The expert of a layer that a parameter belongs to.

    `index`: its number in the layer; `ranks`: data-parallel ranks over which the experts of the layer are divided.
    """

    index: int
    ranks: int


class ExpertParallel:
    """The groups of one rank, by how many ranks the experts of a layer are divided over."""

    def __init__(self, layout: Layout | None = None, dp_rank: int = 0) -> None:
        self._layout = layout or Layout(1, 1, 1)
        self._dp_rank = dp_rank
        self.groups: dict[int, ExpertParallelGroup] = {}

    def group_for(self, experts: int) -> ExpertParallelGroup:
        """The group of a layer with so many experts."""
        size = self._layout.expert_ranks(experts)
        return self.groups.setdefault(size, ExpertParallelGroup(self._dp_rank % size, size))

    def by_name(self, name: str) -> ExpertParallelGroup:
        """The group that is called `name`."""
        return next(group for group in self.groups.values() if group.name == name)

    def connect(self, experts_per_layer: Iterable[int]) -> None:
        """Create the process groups for layers of the whole model; collective over all ranks."""
        layout = self._layout
        for size in sorted({group.size for group in map(self.group_for, experts_per_layer)} - {1}):
            together = [range(first, first + size) for first in range(0, layout.dp, size)]
            alike = [range(first, layout.dp, size) for first in range(size)]
            mine = self.groups[size]
            for pp in range(layout.pp):
                for tp in range(layout.tp):
                    for kind, sets in (("group", together), ("replicas", alike)):
                        for dp_ranks in sets:
                            ranks = [layout.rank(tp, pp, dp) for dp in dp_ranks]
                            group = dist.new_group(ranks)
                            if dist.get_rank() in ranks:
                                setattr(mine, kind, group)
