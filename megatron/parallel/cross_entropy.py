"""Cross entropy over logits whose vocabulary is split over TP (Megatron-LM, arXiv:1909.08053, section 3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.topology import TensorParallelGroup


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
        maximum = logits.amax(dim=-1)
        if tp.size > 1:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=tp.group)
        logits = logits - maximum.unsqueeze(-1)

        vocab = logits.shape[-1]
        local = target - tp.rank * vocab
        foreign = (local < 0) | (local >= vocab)
        local = local.masked_fill(foreign, 0)
        predicted = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.0)
        exp = logits.exp()
        # One collective for both sums: [2, ...]
        sums = torch.stack((predicted, exp.sum(dim=-1)))
        if tp.size > 1:
            dist.all_reduce(sums, group=tp.group)
        predicted, total = sums[0], sums[1]

        softmax = exp.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, local, foreign)
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, local, foreign = ctx.saved_tensors
        grad = softmax.clone()
        one = (~foreign).to(grad.dtype).unsqueeze(-1)
        grad.scatter_add_(-1, local.unsqueeze(-1), -one)
        return grad.mul_(grads[0].unsqueeze(-1)), None, None


def vocab_parallel_cross_entropy(logits: torch.Tensor, target: torch.Tensor, tp: TensorParallelGroup) -> torch.Tensor:
    """Per-token loss.

    `logits` [..., padded_vocab / TP] in float32, `target` [...] of global ids; returns [...] in float32.
    """
    return _VocabParallelCrossEntropy.apply(logits, target, tp)  # type: ignore[no-any-return]
