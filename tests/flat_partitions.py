"""The flat groups of ZeRO-1 as DeepSpeed lays them out by default, without DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatron.checkpointing.state.shard_metadata import FlatParameter, FlatPartition
from megatron.parallel.parameter_slice import ParameterSlice

_ALIGNMENT = 2  # elements, times DP: DeepSpeed's nccl_start_alignment_factor


def flat_partition(parameters: Iterable[tuple[str, ParameterSlice]], dp_rank: int, dp_size: int) -> FlatPartition:
    """The partition of `dp_rank` of a group of `parameters`, flattened in this order as DeepSpeed does by default."""
    table, offset = [], 0
    for name, part in parameters:
        table.append(FlatParameter(name, part, offset))
        offset += math.prod(part.local_shape)
    size = -(-offset // (_ALIGNMENT * dp_size)) * _ALIGNMENT
    return FlatPartition(table, dp_rank * size, size)
