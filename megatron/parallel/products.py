"""Matrix products, in which bf16 and fp16 are widened to fp32 on CPUs that are slow with them.

torch 2.13 multiplies matrices of these types element by element on processors for which oneDNN has no kernels (bf16
needs AVX-512 or AMX, fp16 more): an iteration of the demonstration takes three times as long. The sums
are in fp32 either way; only their order differs. All other tensors are multiplied as they are.
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


def parameter_gradients(grad: torch.Tensor, x: torch.Tensor, bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of weight and, if there is one, bias of `linear`: `grad` [..., m] is that of its result."""
    rows = grad.flatten(0, -2)
    return matmul(rows.t(), x.flatten(0, -2)), rows.sum(0) if bias else None


def _is_widened(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and is_slow_on_cpu(tensor.dtype)


def is_slow_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies matrices of this type element by element."""
    return dtype in _SLOW_ON_CPU


def _has_kernels(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    of_onednn = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return of_onednn._is_mkldnn_bf16_supported()  # type: ignore[no-any-return]
    return of_onednn._is_mkldnn_fp16_supported()  # type: ignore[no-any-return]


# Asked once, as this is imported: torch.compile can trace no question to oneDNN.
_SLOW_ON_CPU = tuple(dtype for dtype in (torch.bfloat16, torch.float16) if not _has_kernels(dtype))


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
        return matmul(grads[0], weight), *parameter_gradients(grads[0], x, ctx.has_bias)
