"""SwiGLU (arXiv:2002.05202), which keeps its input alone for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class _SwiGLU(torch.autograd.Function):
    """The operations and roundings of silu(gate) * up under autograd, which would keep silu(gate) as well."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_and_up)
        of_gate, of_up = out.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=of_gate)
        return out


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2 n], where the gates come first; returns [..., n]."""
    if torch.compiler.is_compiling():  # the compiler decides itself what is kept
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    return _SwiGLU.apply(gate_and_up)  # type: ignore[no-any-return]
