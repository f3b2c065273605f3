"""Cross entropy over logits whose vocabulary is split over TP (Megatron-LM, arXiv:1909.08053, section 3).

Logits are as large as all activations of several layers, so they are kept once, in the type in which the head computes
them: float32 exists of CHUNK_BYTES at a time, and the gradient is written over the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.topology import TensorParallelGroup

CHUNK_BYTES = 128 << 20  # of logits in float32; large enough that starting a kernel for each chunk costs little


def _chunks(rows: torch.Tensor) -> Iterator[slice]:
    length = max(1, CHUNK_BYTES // (4 * rows.shape[-1]))
    return (slice(first, first + length) for first in range(0, len(rows), length))


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
        rows, vocab = logits.flatten(0, -2), logits.shape[-1]
        local = target.flatten() - tp.rank * vocab
        foreign = (local < 0) | (local >= vocab)
        local = local.masked_fill(foreign, 0)
        log_softmax = torch.empty_like(local, dtype=torch.float32)  # of the target, over this rank's vocabulary
        for part in _chunks(rows):
            of_part = torch.log_softmax(rows[part], dim=-1, dtype=torch.float32)
            log_softmax[part] = of_part.gather(-1, local[part].unsqueeze(-1)).squeeze(-1)
        log_sum = rows.gather(-1, local.unsqueeze(-1)).squeeze(-1) - log_softmax
        log_share, losses = _over_ranks(log_softmax, log_sum, foreign, tp)
        ctx.save_for_backward(logits, local, foreign, log_softmax + log_share, log_share)
        return losses.view_as(target)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, local, foreign, log_probability, log_share = ctx.saved_tensors
        grad, index = grads[0].flatten(), local.unsqueeze(-1)
        rows = logits.flatten(0, -2)
        scale = (log_share.exp() * grad).unsqueeze(-1)
        for part in _chunks(rows):
            torch.mul(torch.softmax(rows[part], dim=-1, dtype=torch.float32), scale[part], out=rows[part])
        # Not from what was written: a probability near 1 is 1 in bf16.
        of_target = (log_probability.expm1() * grad).to(rows.dtype).unsqueeze(-1)
        rows.scatter_(-1, index, torch.where(foreign.unsqueeze(-1), rows.gather(-1, index), of_target))
        return rows.view_as(logits), None, None


def _over_ranks(
    log_softmax: torch.Tensor, log_sum: torch.Tensor, foreign: torch.Tensor, tp: TensorParallelGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log of a rank's part of the sum over the whole vocabulary, losses), of what each rank has of its own part."""
    if tp.size == 1:
        return torch.zeros_like(log_sum), -log_softmax
    maximum = log_sum.clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=tp.group)
    log_sum = log_sum - maximum
    # One collective for both sums: [2, ...]
    sums = torch.stack((log_sum.exp(), (log_softmax + log_sum).masked_fill(foreign, 0.0)))
    dist.all_reduce(sums, group=tp.group)
    log_total = sums[0].log()
    return log_sum - log_total, log_total - sums[1]


def vocab_parallel_cross_entropy(logits: torch.Tensor, target: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
    """Per-token loss in float32.

    `logits` [..., padded_vocab / TP] in any floating-point type, `target` [...] of global ids; returns [...].
    The backward pass overwrites `logits`; a second one raises RuntimeError, and so does any other that needs them.
    """
    return _VocabParallelCrossEntropy.apply(logits, target, tp)  # type: ignore[no-any-return]
