"""Makes the weights from the masters: each DP replica rounds its part, and receives the parts of the others.

The result has the bits of DeepSpeed's `update_lp_params`, which runs after every step; where that is slow, the parts
are transferred differently.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from restart_trace.recorder import Operation


def by_broadcasts(backend: str, replicas: int) -> bool:
    """Whether each replica broadcasts its part in place, rather than all of them gathering, as DeepSpeed does.

    gloo's all-gather collects all parts in new memory and copies them from there. To touch that memory for the first
    time takes longer than the transfer. NCCL gathers in place, and uses all links at once.
    """
    return backend == "gloo" and replicas > 1


def update_weights(optimizer: Any, op: Operation) -> None:
    """Make the weights of all DP replicas of their masters; collective over these.

    `optimizer`: DeepSpeed's, of ZeRO-1. The span says which way was taken: "broadcast" or "all_gather".
    """
    groups = optimizer.real_dp_process_group
    if not all(by_broadcasts(dist.get_backend(group), dist.get_world_size(group)) for group in groups):
        with op.span("redistribute", "all_gather"):
            optimizer.update_lp_params()
        return
    with op.span("redistribute", "broadcast"), torch.no_grad():
        under_way = []
        for group, parts, master in zip(groups, *_parts_and_masters(optimizer), strict=True):
            parts[dist.get_rank(group)].copy_(master)
            under_way += [
                dist.broadcast(part, dist.get_global_rank(group, replica), group, async_op=True)
                for replica, part in enumerate(parts)
            ]
        for broadcast in under_way:
            broadcast.wait()


def _parts_and_masters(optimizer: Any) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """By flat group: the weights that each replica has the masters of, views of the live ones; and this one's masters.

    DeepSpeed has two classes of optimizers: bf16, and all else.
    """
    if hasattr(optimizer, "bf16_groups"):
        return optimizer.bf16_partitioned_groups, optimizer.fp32_groups_flat_partition
    return optimizer.parallel_partitioned_bit16_groups, optimizer.single_partition_of_fp32_groups
