"""The biases of ALiBi against the formula, and attention with them against explicit scores."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.config import ModelConfig
from megatron.model.alibi import alibi_bias, alibi_slopes
from megatron.model.transformer import ParallelAttention
from megatron.parallel.placement import Placement
from megatron.parallel.topology import TensorParallelGroup

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, SEQ = 6, 2, 8, 48, 40


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (1, [8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (16, [i / 2 for i in range(1, 17)]),
        (6, [2, 4, 6, 8, 1, 3]),  # of 4 heads, then every other one of 8
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
    ],
)
def test_slopes_are_powers_of_two(heads: int, exponents: list[float]) -> None:
    assert alibi_slopes(heads) == pytest.approx([2.0**-exponent for exponent in exponents])


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_each_tensor_parallel_rank_has_the_biases_of_its_heads(tp: int) -> None:
    whole = alibi_bias(HEADS, range(HEADS), 5, torch.float32, CPU)
    assert whole[0, 4].tolist()[2] == [-1.0, -0.5, 0.0, -math.inf, -math.inf]  # slope 1/2
    count = HEADS // tp
    parts = [alibi_bias(HEADS, range(rank * count, (rank + 1) * count), 5, torch.float32, CPU) for rank in range(tp)]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def attention(dtype: torch.dtype) -> ParallelAttention:
    model = ModelConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, seq_length=SEQ,
        position_embedding_type="alibi", attention_dropout=0.0, init_method_std=0.3,
    )  # fmt: skip
    layer = ParallelAttention(model, Placement(TensorParallelGroup(), dtype, CPU))
    layer.query_key_value.reset_parameters(1, "qkv")
    layer.dense.reset_parameters(1, "dense")
    return layer


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention_is_the_softmax_of_biased_scores(dtype: torch.dtype, tolerance: float) -> None:
    """With the key's position in place of the distance, as Press et al. write it: the softmax is the same."""
    layer = attention(dtype)
    x = torch.randn(2, SEQ, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    parts = layer.query_key_value(x).float().unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
    query, key, value = parts.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) / math.sqrt(HEAD_DIM)
    scores += torch.tensor(alibi_slopes(HEADS)).view(-1, 1, 1) * torch.arange(SEQ)
    scores = scores.masked_fill(torch.ones(SEQ, SEQ).triu(1).bool(), -math.inf)
    expected = layer.dense((scores.softmax(-1) @ value).transpose(1, 2).flatten(2).to(dtype))
    torch.testing.assert_close(layer(x), expected, atol=tolerance, rtol=tolerance)
