"""The conjugate communication pairs f and g of Megatron-LM (arXiv:1909.08053, section 3), and all-to-all."""

from __future__ import annotations

from typing import Any

import torch

from megatron.parallel.collectives import all_reduce, all_to_all, start_all_reduce
from megatron.parallel.products import linear, matmul, parameter_gradients
from megatron.parallel.topology import TensorParallelGroup


class _CopyToRegion(torch.autograd.Function):
    """f: identity forward, all-reduce of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grads[0].clone(), ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _AllToAll(torch.autograd.Function):
    """Part j of the first dimension goes to rank j; so does its gradient, the other way."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return all_to_all(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_to_all(grads[0], ctx.group), None


class _LinearOfCopy(torch.autograd.Function):
    """f and the product that follows: the all-reduce runs while the gradients of the parameters are computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Any) -> torch.Tensor:
        ctx.group = group
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_input = start_all_reduce(matmul(grads[0], weight), ctx.group)
        of_parameters = parameter_gradients(grads[0], x, ctx.has_bias)
        return of_input(), *of_parameters, None


class _SummedLinear(torch.autograd.Function):
    """A product, and g: the sum takes the place of the partial product, which nobody else has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return all_reduce(linear(x, weight), group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        of_weight, _ = parameter_gradients(grads[0], x, bias=False)
        return matmul(grads[0], weight), of_weight, None


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


def linear_of_copy(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallelGroup
) -> torch.Tensor:
    """x W^T + b of a replicated `x` [..., n], where each rank has some rows of W; returns [..., rows of W]."""
    if tp.size == 1:
        return linear(x, weight, bias)
    return _LinearOfCopy.apply(x, weight, bias, tp.group)  # type: ignore[no-any-return]


def summed_linear(x: torch.Tensor, weight: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
    """The sum over all ranks of x W^T, where each rank has some columns of W and of `x` [..., n]; [..., rows of W]."""
    if tp.size == 1:
        return linear(x, weight)
    return _SummedLinear.apply(x, weight, tp.group)  # type: ignore[no-any-return]


def exchange_parts(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """Part i of `parts` [size, ...] goes to rank i; what each rank has for this one, in the same shape, by rank."""
    return _AllToAll.apply(parts, group)  # type: ignore[no-any-return]
