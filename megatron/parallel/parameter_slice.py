"""Which part of a full parameter a tensor-parallel rank holds; everything else is derived from this description.

The shape of the tensor on a rank, its initial values (init.py) and what a checkpoint says about it
(megatron.checkpointing.state.shard_metadata) are computed from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """A rank's part of one of the matrices that are fused into a parameter."""

    shape: tuple[int, ...]  # of the full matrix
    start: int  # along the split dimension, in the full matrix
    stop: int


@dataclass(frozen=True)
class ParameterSlice:
    """The part that rank `tp_rank` of `tp_size` holds of a parameter of full `shape`.

    `dim` is the dimension split over TP; None: every rank holds it all. `blocks` are the sizes along `dim` of the
    matrices fused there (query, key and value; gate and up): the part of a rank is its part of each, in order.
    `vocabulary`: there is one entry per token along `dim`, padded at the end so that TP divides it.
    Raises ValueError if the blocks do not make up the shape, or TP does not divide one of them.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    blocks: tuple[int, ...] = ()
    tp_rank: int = 0
    tp_size: int = 1
    vocabulary: bool = False

    def __post_init__(self) -> None:
        if self.dim is None:
            if self.blocks or self.vocabulary:
                raise ValueError(f"parameter {self.shape}: fused or vocabulary rows need the dimension they lie along")
            return
        if sum(self.blocks) != self.shape[self.dim]:
            raise ValueError(f"parameter {self.shape}: blocks {self.blocks} do not make up dimension {self.dim}")
        if any(block % self.tp_size for block in self.blocks):
            raise ValueError(
                f"parameter {self.shape}: blocks {self.blocks} along dimension {self.dim} cannot be split over "
                f"--tensor-model-parallel-size {self.tp_size}; change the sizes of the model or TP"
            )

    @property
    def pieces(self) -> list[Piece]:
        """This rank's part of each fused matrix; one piece, the whole, of a replicated parameter."""
        if self.dim is None:
            return [Piece(self.shape, 0, self.shape[0] if self.shape else 1)]
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        parts = [(block, block // self.tp_size) for block in self.blocks]
        return [
            Piece((*before, block, *after), self.tp_rank * part, (self.tp_rank + 1) * part) for block, part in parts
        ]

    @property
    def ranges(self) -> list[tuple[int, int]] | None:
        """(start, stop) along `dim` of the full parameter: the local tensor is these, in order. None: replicated."""
        if self.dim is None:
            return None
        found, offset = [], 0
        for block, piece in zip(self.blocks, self.pieces, strict=True):
            found.append((offset + piece.start, offset + piece.stop))
            offset += block
        return found

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the tensor on this rank."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.shape[self.dim] // self.tp_size, *self.shape[self.dim + 1 :])


def slice_of(param: Any, name: str) -> ParameterSlice:
    """The slice that `Placement.parameter` recorded for the parameter `name`. Raises ValueError if there is none."""
    part = getattr(param, "tp_slice", None)
    if part is None:
        raise ValueError(f"{name}: how this parameter is split over TP is unknown; create it with Placement.parameter")
    return part
