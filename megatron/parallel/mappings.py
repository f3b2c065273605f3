"""The conjugate communication pairs f and g of Megatron-LM (arXiv:1909.08053, section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.topology import TensorParallelGroup


def _all_reduce(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    tensor = tensor.contiguous()
    dist.all_reduce(tensor, group=group)
    return tensor


class _CopyToRegion(torch.autograd.Function):
    """f: identity forward, all-reduce of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grads[0].clone(), ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return _all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def copy_to_tensor_parallel_region(x: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
    """Enter a tensor-parallel region with a replicated `x` of any shape."""
    if tp.size == 1:
        return x
    return _CopyToRegion.apply(x, tp.group)  # type: ignore[no-any-return]


def reduce_from_tensor_parallel_region(x: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
    """Leave a tensor-parallel region: sum the partial `x` of all its ranks; any shape."""
    if tp.size == 1:
        return x
    return _ReduceFromRegion.apply(x, tp.group)  # type: ignore[no-any-return]
