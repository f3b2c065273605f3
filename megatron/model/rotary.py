"""Rotary position embeddings (RoFormer, arXiv:2104.09864), halves rotated as in GPT-NeoX and LLaMA."""

from __future__ import annotations

from typing import Any

import torch

# Not functools.lru_cache, which torch.compile looks through: each layer would compute the tables.
_TABLES: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}


def rotary_cos_sin(
    seq_length: int, rotary_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position x frequency, each [seq_length, 1, rotary_dim / 2]; angles computed in float32."""
    key = seq_length, rotary_dim, theta, dtype, str(device)
    if key not in _TABLES:
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device) / rotary_dim
        angles = torch.outer(torch.arange(seq_length, dtype=torch.float32, device=device), 1.0 / theta**exponents)
        angles = angles.unsqueeze(1)
        _TABLES[key] = angles.cos().to(dtype), angles.sin().to(dtype)
    return _TABLES[key]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, *, back: bool) -> None:
    """Write to `out` the rotation of `x`, or its inverse; both [b, s, heads, head_dim]."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    out_first, out_second = out[..., :half], out[..., half : 2 * half]
    sign = -1 if back else 1
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    if x.shape[-1] > 2 * half:
        out[..., 2 * half :] = x[..., 2 * half :]


class _SplitAndRotate(torch.autograd.Function):
    """Keeps the tables alone. The results are parts of one tensor: as a view, the values would keep the projection."""

    @staticmethod
    def forward(
        ctx: Any, heads: torch.Tensor, counts: tuple[int, int], cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        query, rotated = counts[0], sum(counts)
        out = torch.empty_like(heads)
        _rotate(heads[:, :, :rotated], cos, sin, out[:, :, :rotated], back=False)
        out[:, :, rotated:] = heads[:, :, rotated:]
        return out[:, :, :query], out[:, :, query:rotated], out[:, :, rotated:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        query, key, value = grads
        batch, seq, count, head_dim = query.shape
        out = query.new_empty((batch, seq, count + 2 * key.shape[2], head_dim))
        of_query, of_key, of_value = out.split([count, key.shape[2], value.shape[2]], dim=2)
        _rotate(query, cos, sin, of_query, back=True)
        _rotate(key, cos, sin, of_key, back=True)
        of_value.copy_(value)
        return out, None, None, None


def split_and_rotate(
    heads: torch.Tensor, counts: tuple[int, int], cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries, rotated keys, and values, which `heads` [b, s, query + 2 key heads, head_dim] has in that order.

    `counts`: the numbers of query and of key heads. The first 2 x cos.shape[-1] channels of a head are rotated.
    """
    if torch.compiler.is_compiling():
        query, key, value = heads.split([*counts, counts[1]], dim=2)
        return _rotated(query, cos, sin), _rotated(key, cos, sin), value
    return _SplitAndRotate.apply(heads, counts, cos, sin)  # type: ignore[no-any-return]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The formula, for the compiler, which makes one kernel of it and of its gradient."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
