"""The demonstration's model and batches in plain PyTorch: what scripts of the comparisons train.

Split over the ranks of TensorParallel. Nothing of this project is imported, nor is DeepSpeed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class TensorParallel:
    """The TP group of this rank, known once the PipelineModule has made its grid."""

    group: Any = None
    size = 1
    rank = 0


class _Enter(torch.autograd.Function):
    """Identity; sums the gradient over TP."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=TensorParallel.group)
        return grad


class _Sum(torch.autograd.Function):
    """Sum over TP; passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=TensorParallel.group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _Gather(torch.autograd.Function):
    """Parts of the last dimension of all TP ranks together; each gets the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(TensorParallel.size)]
        dist.all_gather(parts, x.contiguous(), group=TensorParallel.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].chunk(TensorParallel.size, dim=-1)[TensorParallel.rank].contiguous()


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight


class Embedding(nn.Module):
    """Token ids [b, s] to [b, s, hidden]; the vocabulary is split over TP."""

    def __init__(self, vocab: int, hidden: int, tp: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(vocab // tp, hidden))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local = ids - TensorParallel.rank * len(self.weight)
        foreign = (local < 0) | (local >= len(self.weight))
        x = F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill(foreign.unsqueeze(-1), 0.0)
        return _Sum.apply(x)  # type: ignore[return-value]


class Block(nn.Module):
    """Attention with grouped key/value heads and rotary positions, and SwiGLU; heads and ffn split over TP."""

    def __init__(self, hidden: int, ffn: int, heads: int, kv_heads: int, tp: int) -> None:
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = hidden // heads, heads // tp, kv_heads // tp
        self.norm_1, self.norm_2 = RMSNorm(hidden), RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * (ffn // tp), bias=False)
        self.down = nn.Linear(ffn // tp, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + _Sum.apply(self.out(self._attend(_Enter.apply(self.norm_1(x)))))
        gate, up = self.up(_Enter.apply(self.norm_2(x))).chunk(2, dim=-1)
        return x + _Sum.apply(self.down(F.silu(gate) * up))

    def _attend(self, x: Any) -> torch.Tensor:
        batch, seq, _ = x.shape
        fused = self.qkv(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        query, key, value = fused.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        query, key = _rotate(query), _rotate(key)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).reshape(batch, seq, -1)


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [b, heads, s, d], halves paired (arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]).float(), 10000.0 ** (-torch.arange(half) / half)).to(x.device)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Head(nn.Module):
    """Final norm and logits [b, s, vocab]."""

    def __init__(self, vocab: int, hidden: int, tp: int) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden)
        self.weight = nn.Parameter(torch.randn(vocab // tp, hidden) / math.sqrt(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Gather.apply(F.linear(_Enter.apply(self.norm(x)), self.weight))  # type: ignore[return-value,arg-type]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def batches(args: argparse.Namespace, first_sample: int, dp: int, dp_rank: int) -> Iterator[tuple]:
    """Micro-batches (tokens, labels) [b, s] of this replica, in order, from a sample on."""
    tokens = np.memmap(args.data + ".bin", dtype=np.uint16, mode="r")
    length, sample = args.seq_length, first_sample + dp_rank * args.micro_batch
    count = (len(tokens) - 1) // length
    while True:
        rows = [(sample + i) % count * length for i in range(args.micro_batch)]
        text = torch.from_numpy(np.stack([tokens[at : at + length + 1] for at in rows]).astype(np.int64))
        yield text[:, :-1].contiguous(), text[:, 1:].contiguous()
        sample += dp * args.micro_batch


def parse_arguments(doc: str | None) -> argparse.Namespace:
    """The command line of a script with this docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="PREFIX.bin holds token ids, two bytes each")
    parser.add_argument("--save", required=True, help="directory of the checkpoints; resumed from if there is one")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the weights in training")
    for name, default in (
        ("--tensor-parallel", 2), ("--pipeline-parallel", 2), ("--layers", 4), ("--hidden-size", 128),
        ("--ffn-size", 344), ("--heads", 4), ("--kv-heads", 2), ("--vocab-size", 4096), ("--seq-length", 128),
        ("--micro-batch", 2), ("--global-batch", 8), ("--iterations", 12), ("--save-interval", 5),
    ):  # fmt: skip
        parser.add_argument(name, type=int, default=default)
    return parser.parse_args()
