"""A transformer block on a device: the kernel of attention, the memory that is kept, and gradients beside a CPU's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.model.transformer import ParallelAttention
from megatron.parallel.placement import Placement
from megatron.parallel.topology import TensorParallelGroup
from tests.unit.megatron.model.test_recomputation import gradients
from tests.unit.tools.ckpt_plan.test_activations import (
    BATCH,
    LLAMA,
    SEQ,
    config_of,
    kept_by_autograd,
    layer_bytes,
    more_on_a_cpu,
)  # fmt: skip

GROUPED = "--num-key-value-heads 2"
ALIBI = "--position-embedding-type alibi"
# All but the one that computes the matrix of scores. If none of them can run, torch raises RuntimeError.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
STATE_BYTES = 1024  # seeds and offsets of random numbers that CUDA's kernels keep, whatever the number of tokens


def attention_without_scores(flags: str, device: torch.device) -> None:
    """Forward and backward pass of the attention that the flags describe."""
    config = config_of(flags).model
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[config.params_dtype]
    layer = ParallelAttention(config, Placement(TensorParallelGroup(), dtype, device))
    x = torch.ones(BATCH, SEQ, config.hidden_size, dtype=dtype, device=device, requires_grad=True)
    with sdpa_kernel(KERNELS):
        layer(x).sum().backward()


@pytest.mark.parametrize("precision", ["--bf16", "--fp16", ""])
@pytest.mark.parametrize("more", ["", GROUPED])
@pytest.mark.parametrize("style", [LLAMA, ALIBI], ids=["llama", "alibi"])
def test_attention_never_computes_the_matrix_of_scores(
    precision: str, more: str, style: str, device: torch.device
) -> None:
    attention_without_scores(f"{precision} {style} {more}", device)


@pytest.mark.parametrize("more", ["", GROUPED])
@pytest.mark.parametrize("style", [LLAMA, ALIBI], ids=["llama", "alibi"])
def test_nor_with_dropout_on_a_gpu(more: str, style: str) -> None:
    attention_without_scores(f"--bf16 {style} {more} --attention-dropout 0.1", torch.device("cuda"))


@pytest.mark.parametrize(
    "flags",
    [
        f"--bf16 {LLAMA} {GROUPED} --hidden-dropout 0",
        "--bf16 --hidden-dropout 0.1",
        f"--bf16 {ALIBI} --hidden-dropout 0",
    ],
    ids=["llama", "classic", "alibi"],
)
@pytest.mark.parametrize("mode", ["", " --recompute-granularity selective"], ids=["none", "selective"])
def test_a_block_keeps_what_the_plan_says(flags: str, mode: str, device: torch.device) -> None:
    config = config_of(flags + mode)
    of_cpu = more_on_a_cpu(config) if device.type == "cpu" else 0
    expected = BATCH * SEQ * (layer_bytes(config.model, 1) + of_cpu)
    found = kept_by_autograd(config, TensorParallelGroup(), device)
    assert 0 <= found - expected <= (0 if device.type == "cpu" else STATE_BYTES)


@pytest.mark.parametrize("mode", ["", " --recompute-granularity selective"], ids=["none", "selective"])
def test_gradients_are_those_of_a_cpu(mode: str, device: torch.device) -> None:
    flags = f"{LLAMA} {GROUPED} --hidden-dropout 0"
    for found, expected in zip(gradients(flags + mode, device), gradients(flags), strict=True):
        torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-3)
