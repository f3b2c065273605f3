"""Attention with linear biases instead of position embeddings (ALiBi, Press et al., arXiv:2108.12409)."""

from __future__ import annotations

from typing import Any

import torch

# Shared by all layers of a rank. Not functools.lru_cache, as in rotary.py.
_TABLES: dict[tuple[Any, ...], torch.Tensor] = {}


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each head.

    For n heads, n a power of two: 2^(-8/n), 2^(-16/n), ..., 2^(-8). For another number: those of the largest power of
    two below it, then the first, third, ... of twice as many heads, as the authors' program has them.
    """
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    return slopes + [2.0 ** (-4.0 * (head + 1) / power) for head in range(0, 2 * (num_heads - power), 2)]


def alibi_bias(num_heads: int, heads: range, seq_length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to the scores of `heads`, of `num_heads` in the model: [1, len(heads), seq_length, seq_length].

    -slope x distance, computed in float32, and -inf for later tokens. Distances rather than positions, which give the
    same softmax: in bf16 the largest biases are rounded most, and these then belong to the smallest weights.
    """
    key = num_heads, heads.start, heads.stop, seq_length, dtype, str(device)
    if key not in _TABLES:
        positions = torch.arange(seq_length, dtype=torch.float32, device=device)
        distances = positions.unsqueeze(1) - positions
        table = torch.empty((1, len(heads), seq_length, seq_length), dtype=dtype, device=device)
        for bias, slope in zip(table[0], alibi_slopes(num_heads)[heads.start : heads.stop], strict=True):
            bias.copy_((distances * -slope).masked_fill_(distances < 0, -torch.inf))
        _TABLES[key] = table
    return _TABLES[key]
