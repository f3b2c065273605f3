"""Normalisation layers; computed in float32, weights in the parameter dtype.

With --sequence-parallel a rank's input is its part of the sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.parallel.placement import Placement
from megatron.parallel.sequence import replicated


class _RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm as torch's fused kernel for CUDA has it: in float32, rounded once; its input and one statistic are kept.

    torch 2.6 to 2.15 compose it on CPUs of operations that keep the input and the result in float32 beside these.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        inverse_rms = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        return (wide * inverse_rms).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad, normalized = grads[0].float(), x.float() * inverse_rms
        of_weight = (grad * normalized).flatten(0, -2).sum(0).to(weight.dtype)
        weighted = grad * weight
        along = (weighted * normalized).mean(-1, keepdim=True)
        of_x = weighted.addcmul_(normalized, along, value=-1).mul_(inverse_rms)
        return of_x.to(x.dtype), of_weight, None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467)."""

    def __init__(self, hidden_size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.tp = place.tp
        self.weight = place.parameter(hidden_size)

    def reset_parameters(self, seed: int, prefix: str) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = replicated(self.weight, self.tp)
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            return _RMSNormOnCPU.apply(x, weight, self.eps)  # type: ignore[no-any-return]
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)  # one kernel on CUDA since torch 2.9


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimension (arXiv:1607.06450)."""

    def __init__(self, hidden_size: int, eps: float, place: Placement) -> None:
        super().__init__()
        self.eps = eps
        self.tp = place.tp
        self.weight = place.parameter(hidden_size)
        self.bias = place.parameter(hidden_size)

    def reset_parameters(self, seed: int, prefix: str) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The kernel accumulates in float32 whatever the dtype of its input.
        weight, bias = replicated(self.weight, self.tp), replicated(self.bias, self.tp)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)


def build_norm(normalization: str, hidden_size: int, eps: float, place: Placement) -> RMSNorm | LayerNorm:
    """The layer that --normalization names: rmsnorm or layernorm."""
    cls = RMSNorm if normalization == "rmsnorm" else LayerNorm
    return cls(hidden_size, eps, place)
