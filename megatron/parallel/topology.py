"""Rank <-> (tp, pp, dp) coordinates, by arithmetic alone: known before torch is imported.

The order is DeepSpeed's PipeModelDataParallelTopology: axes (pipe, data, model), the last varying fastest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Coordinates(NamedTuple):
    """The coordinates of a rank in the layout."""

    tp: int
    pp: int
    dp: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the tensor-, pipeline- and data-parallel dimensions.

    `dp` counts all ranks that hold the same part of the model: of each replica those that have parts of the same
    sequences (--ds-sequence-parallel-size), one after the other. `ep`: how many neighbours of these the experts of a
    layer are divided over (--moe-expert-parallel-size). `zero`: 3 where `dp` also divides the weights (--zero-stage 3).
    """

    tp: int
    pp: int
    dp: int
    ep: int = 1
    zero: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of global rank `rank`. Raises ValueError outside [0, world_size)."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the layout TP{self.tp} PP{self.pp} DP{self.dp}")
        return Coordinates(tp=rank % self.tp, pp=rank // (self.dp * self.tp), dp=rank // self.tp % self.dp)

    def rank(self, tp: int, pp: int, dp: int) -> int:
        """Global rank at these coordinates."""
        return (pp * self.dp + dp) * self.tp + tp

    def expert_ranks(self, experts: int) -> int:
        """Over how many data-parallel ranks the experts of a layer with so many are divided; of fewer experts than `ep`
        each rank has one.
        """
        return min(self.ep, experts)

    def expert_holders(self, experts: int, expert: int) -> range:
        """The data-parallel ranks that hold expert number `expert` of a layer with `experts`."""
        ranks = self.expert_ranks(experts)
        return range(expert // (experts // ranks), self.dp, ranks)

    def as_dict(self) -> dict[str, int]:
        """The sizes by name; "ep" only where experts are divided, "zero" only where weights are."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        return sizes | {name: value for name, value in (("ep", self.ep), ("zero", self.zero)) if value != 1}

    def __str__(self) -> str:
        return " ".join(f"{name.upper()}{size}" for name, size in self.as_dict().items())


@dataclass
class SequenceGroup:
    """Rank and size among the ranks that hold parts of the same sequences, and their process group once it exists.

    They are neighbours along dp (megatron/parallel/ulysses.py).
    """

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, at: Coordinates, size: int) -> SequenceGroup:
        """That of the rank at these coordinates."""
        return cls(rank=at.dp % size, size=size)


@dataclass
class TensorParallelGroup:
    """Rank and size within the tensor-parallel group, and the process group once it exists.

    Layers are built from rank and size; `group` (a torch.distributed.ProcessGroup) is only needed when they
    run, and DeepSpeed's pipeline grid creates it, so it is filled in after that. `sequence_parallel`: the flag.
    """

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, repr=False)
    sequence_parallel: bool = False

    @property
    def splits_sequence(self) -> bool:
        """Whether each rank holds a part of the sequence between the tensor-parallel layers."""
        return self.sequence_parallel and self.size > 1
