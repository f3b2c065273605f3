"""Sequence parallelism of DeepSpeed-Ulysses: --ds-sequence-parallel-size.

The method is that of Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long
Sequence Transformer Models" (arXiv:2309.14509): of each sample every rank of a group has a part of the sequence, and
all layers work on that. For the core of attention they exchange: a rank gets the whole sequence of a part of the heads,
and gives the results back. The ranks hold the same weights, so for the optimizer they are data-parallel ranks.

All heads of a rank, queries, keys and values, go in one all-to-all, before the rotation: positions are then those of
the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.mappings import exchange_parts
from megatron.parallel.topology import Layout, SequenceGroup


def new_sequence_group(layout: Layout, size: int, rank: int) -> Any:
    """The process group of each `size` neighbours along dp; that of global rank `rank`. Collective over all ranks."""
    mine = None
    for pp in range(layout.pp):
        for tp in range(layout.tp):
            for first in range(0, layout.dp, size):
                ranks = [layout.rank(tp, pp, dp) for dp in range(first, first + size)]
                group = dist.new_group(ranks)
                mine = group if rank in ranks else mine
    return mine


def gather_sequence(heads: torch.Tensor, counts: Sequence[int], sequence: SequenceGroup) -> torch.Tensor:
    """The whole sequence of this rank's part of the heads: [b, s, heads / size, n] of `heads` [b, s / size, heads, n].

    `counts`: the number of heads of each kind (queries, keys, values), multiples of the group's size. Each kind is
    split over the group by itself, and the kinds stay in their order. A group of one has all heads already.
    """
    size = sequence.size
    if size == 1:
        return heads
    by_rank = [kind.unflatten(2, (size, -1)) for kind in heads.split(list(counts), dim=2)]
    parts = torch.cat(by_rank, dim=3).permute(2, 0, 1, 3, 4)
    received = exchange_parts(parts, sequence.group)
    return received.transpose(0, 1).flatten(1, 2)


def scatter_sequence(heads: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
    """All heads of this rank's part of the sequence: the reverse of gather_sequence, for heads of one kind."""
    size = sequence.size
    if size == 1:
        return heads
    parts = heads.unflatten(1, (size, -1)).transpose(0, 1)
    received = exchange_parts(parts, sequence.group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
