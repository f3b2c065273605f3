"""The state of a rank where ZeRO stage 3 divides weights, master weights and moments over all ranks.

It is in two files of the rank's own, with DeepSpeed's names and content. The weights are in none: they are the master
weights, rounded. All arguments called `engine` are DeepSpeed's, of stage 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

MASTERS = "fp32_flat_groups"  # key of the master weights in DeepSpeed's shards
BASE = "optimizer_state_dict"  # and of the state of the optimizer that it wraps


def divides_weights(engine: Any) -> bool:
    """Whether DeepSpeed's `engine` is of stage 3."""
    return hasattr(engine.optimizer, "fp32_partitioned_groups_flat")


def placeholders(engine: Any) -> dict[str, torch.Tensor]:
    """What DeepSpeed saves for a model of which no rank has the weights: an empty tensor for each, and the buffers.

    Small parameters, which stay gathered between steps, are no exception.
    """
    params = dict(engine.module.named_parameters(remove_duplicate=False))
    return {
        key: torch.empty(0, dtype=params[key].dtype) if key in params else tensor
        for key, tensor in engine.module.state_dict().items()
    }


def live_masters(engine: Any) -> list[torch.Tensor]:
    """This rank's parts of the master weights: a flat tensor for each group of parameters, or more for a large one."""
    return [master.detach() for master in engine.optimizer.fp32_partitioned_groups_flat]


def live_tensors(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All that this rank holds, by name: its parts of weights, master weights and moments."""
    for name, param in engine.module.named_parameters():
        yield f"weight/{name}", param.ds_tensor
    for index, master in enumerate(engine.optimizer.fp32_partitioned_groups_flat):
        yield f"master/{index}", master
        for name, value in engine.basic_optimizer.state.get(master, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer/{index}/{name}", value


def without_padding(engine: Any, index: int, flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """The parts of `flat`, which has the shape of the live master at that index, that are elements of parameters.

    DeepSpeed cuts each parameter into equal parts, one a rank; what is left of the last ones means nothing.
    """
    rank, offset = dist.get_rank(engine.optimizer.dp_process_group), 0
    for param in engine.optimizer.fp16_groups[index]:
        size = param.partition_numel()
        held = min(max(param.ds_numel - rank * size, 0), size)
        yield flat[offset : offset + held]
        offset += size


def restore(engine: Any, shard: Mapping[str, Any], *, with_moments: bool) -> None:
    """Put `shard`, the `optimizer_state_dict` of this rank's file, into the live engine, and the weights with it.

    Parameters that DeepSpeed keeps gathered have their old values until `share_weights` gathers them again.
    """
    optimizer = engine.optimizer
    optimizer.checkpoint_event_prologue()
    optimizer._rigid_load_state_dict(shard, load_optimizer_states=with_moments)


def share_weights(engine: Any) -> None:
    """Gather what every rank keeps whole between steps, small parameters; collective."""
    engine.optimizer.checkpoint_event_epilogue()


def initialize(engine: Any, seed: int) -> None:
    """Initialize weights and master weights; collective. The values are those of ZeRO-1 for the same seed."""
    engine.optimizer.checkpoint_event_prologue()
    for flat in engine.optimizer.fp16_partitioned_groups_flat:
        flat.zero_()  # also what is left of the last parts, where DeepSpeed leaves what was in memory
    engine.module.initialize_parameters(seed)
    engine.optimizer._restore_from_bit16_weights()
    share_weights(engine)
