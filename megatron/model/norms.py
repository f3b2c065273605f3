"""Normalisation layers; computed in float32, weights in the parameter dtype.

With --sequence-parallel a rank's input is its part of the sequence.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron.parallel.placement import Placement
from megatron.parallel.sequence import replicated


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
        return F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps).to(x.dtype) * replicated(self.weight, self.tp)


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
