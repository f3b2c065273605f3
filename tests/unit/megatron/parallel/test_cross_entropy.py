"""The loss against torch's, and where its gradient is written. Over TP: tests/dist/test_parallel_equivalence.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.parallel import cross_entropy
from megatron.parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.parallel.topology import TensorParallelGroup
from tools.ckpt_plan.activations import LOSS_CHUNK_BYTES, loss_chunk_bytes

TP, VOCAB = TensorParallelGroup(), 50
SHAPE = (3, 5)


def batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, targets and gradients of the losses; one token is predicted with near certainty."""
    generator = torch.Generator().manual_seed(1)
    logits = 4.0 * torch.randn((*SHAPE, VOCAB), generator=generator)
    targets = torch.randint(VOCAB, SHAPE, generator=generator)
    logits[0, 0, targets[0, 0]] = 20.0
    return logits.to(dtype).requires_grad_(), targets, torch.rand(SHAPE, generator=generator)


@pytest.mark.parametrize("rows", [1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_those_of_float32(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 4 * VOCAB * rows)
    logits, targets, grad = batch(dtype)
    expected = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none").view(SHAPE)
    (of_logits,) = torch.autograd.grad(expected, logits, grad.double())
    losses = vocab_parallel_cross_entropy(logits * 1, targets, TP)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected.float(), atol=1e-5, rtol=1e-5)
    (found,) = torch.autograd.grad(losses, logits, grad)
    torch.testing.assert_close(found, of_logits, atol=2**-23, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5)


def test_the_gradient_takes_the_place_of_the_logits_and_a_second_one_is_refused() -> None:
    logits, targets, grad = batch(torch.bfloat16)
    computed = logits * 1
    losses = vocab_parallel_cross_entropy(computed, targets, TP)
    (found,) = torch.autograd.grad(losses, computed, grad, retain_graph=True)
    assert found.data_ptr() == computed.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(losses, computed, grad)


def test_the_plan_has_the_same_size_of_chunk() -> None:
    assert LOSS_CHUNK_BYTES == cross_entropy.CHUNK_BYTES
    assert loss_chunk_bytes(tokens=10, padded_vocab_size=VOCAB, tp=1) == 10 * 4 * VOCAB
    assert loss_chunk_bytes(1 << 20, 32000, tp=2) == LOSS_CHUNK_BYTES // 64000 * 64000
