"""Matrix products, in which a CPU widens bf16 and fp16 to fp32.

torch 2.13 multiplies matrices of these types element by element on processors without instructions for it (AVX-512,
AMX): a layer of the demonstration, forward and backward, takes 27 times as long as one that is widened. Its sums are
in fp32 either way; only their order differs. Tensors on other devices and of other types are multiplied as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b, as `F.linear`: x [..., n], weight [m, n], bias [m]; returns [..., m] in the type of x."""
    return _WidenedLinear.apply(x, weight, bias) if _is_widened(x) else F.linear(x, weight, bias)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b, as `torch.matmul`, for code that has no gradient: a graph would keep the widened operands."""
    return (a.float() @ b.float()).to(a.dtype) if _is_widened(a) else a @ b


def _is_widened(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16)


class _WidenedLinear(torch.autograd.Function):
    """Keeps its operands as they were given, and widens them again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)  # [rows, m]
        of_weight = matmul(grad.t(), x.flatten(0, -2))
        return matmul(grads[0], weight), of_weight, grad.sum(0) if ctx.has_bias else None
