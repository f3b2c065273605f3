"""Sequence parallelism: between the tensor-parallel layers each TP rank holds its part of the sequence.

The method is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198), section 4.2.2: normalisation, dropout and residual sums work on [b, s / TP, hidden]; a
column-parallel layer gathers the sequence, and a row-parallel one sums and scatters it, instead of an all-reduce. The
column-parallel layer keeps only its own part of the gathered input, and gathers it once more in the backward pass.

Batches come first here, so parts of several samples are copied into the order that the collectives need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.parallel.collectives import start_all_gather, start_reduce_scatter
from megatron.parallel.mappings import copy_to_tensor_parallel_region
from megatron.parallel.products import linear, matmul, parameter_gradients
from megatron.parallel.topology import TensorParallelGroup


def _start_all_gather(part: torch.Tensor, tp: TensorParallelGroup) -> Callable[[], torch.Tensor]:
    """Start to gather [b, s / TP, n] of every rank; the result waits for it and returns [b, s, n]."""
    batch, length, width = part.shape
    gathered = start_all_gather(part, tp.size, tp.group)

    def finish() -> torch.Tensor:
        return gathered().view(tp.size, batch, length, width).transpose(0, 1).reshape(batch, tp.size * length, width)

    return finish


def _start_reduce_scatter(partial: torch.Tensor, tp: TensorParallelGroup) -> Callable[[], torch.Tensor]:
    """Start to sum [b, s, n] over the ranks; the result waits for it and returns this rank's [b, s / TP, n]."""
    batch, length, width = partial.shape
    parts = partial.view(batch, tp.size, length // tp.size, width).transpose(0, 1).reshape(tp.size * batch, -1, width)
    return start_reduce_scatter(parts, tp.size, tp.group)


class _LinearOfGathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallelGroup
    ) -> torch.Tensor:
        ctx.tp = tp
        ctx.has_bias = bias is not None
        ctx.save_for_backward(part, weight)
        return linear(_start_all_gather(part, tp)(), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, None]:
        part, weight = ctx.saved_tensors
        # Each collective runs beside a product: of all ranks' inputs, of the gradient of the input.
        gathered = _start_all_gather(part, ctx.tp)
        of_input = _start_reduce_scatter(matmul(grads[0], weight), ctx.tp)
        of_parameters = parameter_gradients(grads[0], gathered(), ctx.has_bias)
        return of_input(), *of_parameters, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
        ctx.tp = tp
        return _start_reduce_scatter(partial.contiguous(), tp)()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _start_all_gather(grads[0], ctx.tp)(), None


def linear_of_gathered_sequence(
    part: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: TensorParallelGroup
) -> torch.Tensor:
    """x W^T + b of the whole sequence x, of which each rank has `part` [b, s / TP, n]; returns [b, s, rows of W]."""
    return _LinearOfGathered.apply(part, weight, bias, tp)  # type: ignore[no-any-return]


def reduce_scatter_sequence(partial: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
    """This rank's part, [b, s / TP, n], of the sum of `partial` [b, s, n] over the ranks."""
    return _ReduceScatter.apply(partial, tp)  # type: ignore[no-any-return]


def part_of_sequence(x: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
    """This rank's part, [b, s / TP], of `x` [b, s], which needs no gradient; all of it without --sequence-parallel.

    TP must divide s.
    """
    return x.chunk(tp.size, dim=1)[tp.rank] if tp.splits_sequence else x


def replicated(parameter: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
    """A parameter that all ranks hold, to be applied to this rank's part of the sequence.

    Its gradient, which each rank has of its own tokens only, is summed over the ranks in the backward pass of every
    micro batch, and so is the same on all of them. Without --sequence-parallel: the parameter as it is.
    """
    return copy_to_tensor_parallel_region(parameter, tp) if tp.splits_sequence else parameter
