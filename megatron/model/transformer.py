"""One transformer block: pre-norm attention and MLP with tensor parallelism."""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import ModelConfig
from megatron.model.alibi import alibi_bias
from megatron.model.experts import AuxiliaryLoss, MoE
from megatron.model.norms import build_norm
from megatron.model.recomputation import Layer, feed_recomputed
from megatron.model.rotary import rotary_cos_sin, split_and_rotate
from megatron.model.swiglu import swiglu
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.placement import Placement
from megatron.parallel.random import model_parallel_rng, residual_dropout
from megatron.parallel.ulysses import gather_sequence, scatter_sequence


def output_layer_std(config: ModelConfig) -> float:
    """Standard deviation of layers that write to the residual stream: std / sqrt(2 L) (GPT-2)."""
    return config.init_method_std / (2.0 * config.num_layers) ** 0.5


class ParallelAttention(nn.Module):
    """Causal self-attention with grouped key/value heads; heads split over TP.

    The rows of query_key_value.weight on a rank are its query heads, then its key heads, then its value heads.
    Input and output [b, s, hidden], or with --sequence-parallel [b, s / TP, hidden]. With --ds-sequence-parallel-size
    s is a rank's part of the sequence, and it attends to the whole with a part of these heads.
    """

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.kv_channels
        self.sequence = place.sequence
        parts, part = place.tp.size * place.sequence.size, place.tp.rank * place.sequence.size + place.sequence.rank
        self.num_heads = config.num_attention_heads // parts
        self.num_kv_heads = config.num_key_value_heads // parts
        self.heads = range(part * self.num_heads, (part + 1) * self.num_heads)
        query_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.query_key_value = ColumnParallelLinear(
            config.hidden_size,
            (query_size, kv_size, kv_size),
            bias=config.add_bias_linear,
            init_std=config.init_method_std,
            place=place,
        )
        self.dense = RowParallelLinear(
            query_size, config.hidden_size, bias=config.add_bias_linear, init_std=output_layer_std(config), place=place
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = self.query_key_value(x).unflatten(-1, (-1, self.head_dim))
        counts = [count * self.sequence.size for count in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        heads = gather_sequence(projected, counts, self.sequence)
        seq = heads.shape[1]
        if self.config.use_rotary_position_embeddings:
            cos, sin = rotary_cos_sin(seq, self.config.rotary_dim, self.config.rope_theta, x.dtype, x.device)
            query, key, value = split_and_rotate(heads, (self.num_heads, self.num_kv_heads), cos, sin)
        else:
            query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
        context = self._attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return self.dense(scatter_sequence(context.transpose(1, 2), self.sequence).flatten(2))

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[b, heads, s, head_dim] each, kv with fewer heads; returns the shape of `query`."""
        dropout = self.config.attention_dropout
        if dropout and not self.training:  # in this order: compiled code without dropout is one for both
            dropout = 0.0
        config, bias = self.config, None
        if config.uses_alibi:
            seq = query.shape[2]
            bias = alibi_bias(config.num_attention_heads, self.heads, seq, query.dtype, query.device)
        grouped = self.num_kv_heads != self.num_heads
        if grouped and (bias is not None or query.dtype == torch.float32) and query.device.type != "cpu":
            # In fp32, and with a bias, CUDA's kernels without a matrix of scores take no grouped heads.
            each = self.num_heads // self.num_kv_heads
            key, value = key.repeat_interleave(each, dim=1), value.repeat_interleave(each, dim=1)
            grouped = False
        # Heads are split, so each TP rank draws its own mask, as does each rank of a sequence (seed_everything).
        with model_parallel_rng() if dropout else contextlib.nullcontext():
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=bias, dropout_p=dropout, is_causal=bias is None, enable_gqa=grouped
            )


class ParallelMLP(nn.Module):
    """hidden -> ffn -> hidden; SwiGLU (arXiv:2002.05202) or GELU.

    Input and output [b, s, hidden], or with --sequence-parallel [b, s / TP, hidden].
    With SwiGLU the rows of dense_h_to_4h.weight on a rank are its gate rows, then its up rows.
    """

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        super().__init__()
        self.recomputes = config.recomputes_selectively
        self.swiglu = config.swiglu
        self.gelu_approximate = config.gelu_approximate
        ffn = config.ffn_hidden_size
        self.dense_h_to_4h = ColumnParallelLinear(
            config.hidden_size,
            (ffn, ffn) if config.swiglu else (ffn,),
            bias=config.add_bias_linear,
            init_std=config.init_method_std,
            place=place,
        )
        self.dense_4h_to_h = RowParallelLinear(
            ffn, config.hidden_size, bias=config.add_bias_linear, init_std=output_layer_std(config), place=place
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _feed(self._activation, self.dense_4h_to_h, self.dense_h_to_4h(x), self.recomputes)

    def _activation(self, h: torch.Tensor) -> torch.Tensor:
        return swiglu(h) if self.swiglu else F.gelu(h, approximate=self.gelu_approximate)


def _feed(producer: Layer, consumer: Layer, x: torch.Tensor, recomputed: bool) -> torch.Tensor:
    """consumer(producer(x)); with --recompute-granularity selective producer(x) is not kept for the backward pass."""
    return feed_recomputed(producer, consumer, x) if recomputed else consumer(producer(x))


class ParallelTransformerLayerPipe(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Input and output [b, s, hidden], or with --sequence-parallel a part of the sequence, [b, s / TP, hidden].
    `experts`: of its MLP, if these are more than one; their loss goes to `auxiliary`.
    """

    def __init__(
        self, config: ModelConfig, place: Placement, experts: int = 1, auxiliary: AuxiliaryLoss | None = None
    ) -> None:
        super().__init__()
        self.tp = place.tp
        self.recomputes = config.recomputes_selectively
        self.hidden_dropout = config.hidden_dropout
        norm = (config.normalization, config.hidden_size, config.layernorm_epsilon, place)
        self.input_layernorm = build_norm(*norm)
        self.self_attention = ParallelAttention(config, place)
        self.post_attention_layernorm = build_norm(*norm)
        build = functools.partial(ParallelMLP, config, place)
        self.mlp = build() if auxiliary is None or experts == 1 else MoE(config, experts, place, auxiliary, build)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attention = _feed(self.input_layernorm, self.self_attention, x, self.recomputes)
        x = x + residual_dropout(attention, self.hidden_dropout, self.training, self.tp)
        mlp = _feed(self.post_attention_layernorm, self.mlp, x, self.recomputes)
        return x + residual_dropout(mlp, self.hidden_dropout, self.training, self.tp)
