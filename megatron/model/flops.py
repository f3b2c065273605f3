"""Floating-point operations of training by formula: what TFLOPs and MFU are computed from. Imports no torch."""

from __future__ import annotations

from megatron.config import Config


def flops_of_batch(config: Config, padded_vocab_size: int, batch_size: int) -> float:
    """Floating-point operations of one iteration of `batch_size` samples over all ranks.

    Counts matrix products only: 2 operations for each multiply-add, the backward pass as twice the forward pass, no
    recomputation, and attention scores without the causal mask, as is customary (arXiv:2104.04473, appendix). Of a
    mixture of experts those count that a token is sent to, also if they drop it.
    """
    model = config.model
    tokens = batch_size * model.seq_length
    projection = model.kv_channels * (2 * model.num_attention_heads + 2 * model.num_key_value_heads)
    mlp = (3 if model.swiglu else 2) * model.ffn_hidden_size
    scores = 2 * model.seq_length * model.kv_channels * model.num_attention_heads
    per_token = model.num_layers * (model.hidden_size * projection + scores)
    for experts in model.experts_per_layer:
        gate = experts + 2 * model.has_residual_mlp if experts > 1 else 0
        per_token += model.hidden_size * (mlp * model.mlps_of_a_token(experts) + gate)
    return 6.0 * tokens * (per_token + model.hidden_size * padded_vocab_size)
