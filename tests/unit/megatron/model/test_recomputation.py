"""Selective recomputation: gradients to the last bit. Memory: tests/unit/tools/ckpt_plan/test_activations.py."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from megatron.model.recomputation import feed_recomputed
from megatron.model.transformer import ParallelTransformerLayerPipe
from megatron.parallel.placement import Placement
from megatron.parallel.topology import TensorParallelGroup
from tests.unit.tools.ckpt_plan.test_activations import BATCH, CPU, HIDDEN, LLAMA, SEQ, config_of

SELECTIVE = "--recompute-granularity selective"


def gradients(flags: str, device: torch.device = CPU) -> list[torch.Tensor]:
    """Output of a block, gradient of its input, and gradients of its parameters."""
    config = config_of(flags).model
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    layer = ParallelTransformerLayerPipe(config, Placement(TensorParallelGroup(), dtype, device))
    for name, module in layer.named_modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters(1, name)  # pyright: ignore[reportCallIssue]
    torch.manual_seed(2)
    x, grad = (torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype).to(device) for _ in range(2))
    y = layer(x.requires_grad_())
    y.backward(grad)
    found = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [y.detach(), *(each for each in found if each is not None)]


@pytest.mark.parametrize(
    "flags", [f"--bf16 {LLAMA} --num-key-value-heads 2 --hidden-dropout 0.1", "--hidden-dropout 0"]
)
def test_gradients_are_the_same_to_the_last_bit(flags: str) -> None:
    kept, recomputed = gradients(flags), gradients(f"{flags} {SELECTIVE}")
    assert len(kept) == len(recomputed) >= 8
    for mine, expected in zip(recomputed, kept, strict=True):
        assert torch.equal(mine, expected)


def test_a_forward_pass_without_a_backward_pass_leaves_nothing() -> None:
    """As after an error: a consumer such as attention keeps its own result for the backward pass."""
    x = torch.randn(1, 1, 4, 8, requires_grad=True) * 1
    y = feed_recomputed(lambda t: 2 * t, lambda t: F.scaled_dot_product_attention(t, t, t), x)
    left = weakref.ref(y)
    del y
    gc.collect()
    assert left() is None
