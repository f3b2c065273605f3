"""Rotary position embeddings (RoFormer, arXiv:2104.09864), halves rotated as in GPT-NeoX and LLaMA."""

from __future__ import annotations

import functools

import torch


@functools.lru_cache(maxsize=4)
def rotary_cos_sin(
    seq_length: int, rotary_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position x frequency, each [seq_length, 1, rotary_dim]; angles computed in float32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
    angles = torch.outer(torch.arange(seq_length, dtype=torch.float32, device=device), 1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first cos.shape[-1] channels of each head; x is [b, s, heads, head_dim]."""
    rotary_dim = cos.shape[-1]
    rotated, passed = x[..., :rotary_dim], x[..., rotary_dim:]
    first, second = rotated.chunk(2, dim=-1)
    out = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return out if passed.shape[-1] == 0 else torch.cat((out, passed), dim=-1)
