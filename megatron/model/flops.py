"""Floating-point operations of training by formula: what TFLOPs and MFU are computed from. Imports no torch."""

from __future__ import annotations

from megatron.config import Config


def flops_of_batch(config: Config, padded_vocab_size: int, batch_size: int) -> float:
    """Floating-point operations of one iteration of `batch_size` samples over all ranks.

    Counts matrix products only: 2 operations for each multiply-add, the backward pass as twice the forward pass, no
    recomputation, and attention scores without the causal mask, as is customary (arXiv:2104.04473, appendix).
    """
    model = config.model
    tokens = batch_size * model.seq_length
    projection = model.kv_channels * (2 * model.num_attention_heads + 2 * model.num_key_value_heads)
    mlp = (3 if model.swiglu else 2) * model.ffn_hidden_size
    scores = 2 * model.seq_length * model.kv_channels * model.num_attention_heads
    per_token = model.num_layers * (model.hidden_size * (projection + mlp) + scores)
    return 6.0 * tokens * (per_token + model.hidden_size * padded_vocab_size)
