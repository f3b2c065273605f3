"""Memory of activations: what autograd saves in the forward pass for the backward pass.

The method is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198), section 4: count what each operation saves. Their layer needs 34 sbh bytes without the attention
matrix (equation 1), sbh (10 + 24/t) over t tensor-parallel ranks (equation 2), and 34 sbh / t with sequence parallelism
(equation 4). The formulas here are for the layer of megatron/model/transformer.py: attention by a kernel that stores no
matrix, SwiGLU or GELU, grouped key/value heads. For the layer of the paper they give the same result, plus the
statistics of the normalisations. On CUDA before torch 2.9 RMSNorm is composed of operations that keep more. All
layers share the matrix of ALiBi's biases.

All are bytes per token; s tokens per sample, b samples in a micro batch.
"""

from __future__ import annotations

from megatron.config import Config, ModelConfig

from .tensors import stage_bounds

_FP32 = 4
ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
LOSS_CHUNK_BYTES = 128 << 20  # CHUNK_BYTES of megatron/parallel/cross_entropy.py, which imports torch


def layer_bytes(
    model: ModelConfig,
    tp: int,
    sequence_parallel: bool = False,
    *,
    experts: int = 1,
    tokens: int = 1,
    exchanges: bool = False,
) -> int:
    """Bytes of one transformer layer on a rank, per token of a micro batch of `tokens`.

    `exchanges`: heads for parts of a sequence, by --ds-sequence-parallel-size; of its tokens the rank has a part then.
    """
    size, hidden = ELEMENT_SIZE[model.params_dtype], model.hidden_size
    query = model.num_attention_heads * model.kv_channels
    key = model.num_key_value_heads * model.kv_channels
    # Queries, keys and values, the result, and the log-sum-exp of the softmax.
    attention = size * (query + 2 * key + query) + _FP32 * model.num_attention_heads
    if exchanges:  # what the kernel returned, and what came back from the ranks for the layer after it
        attention += size * query
    # What goes into the activation function and what comes out; selective recomputation keeps neither the latter nor
    # the inputs of the two column-parallel layers.
    kept = 0 if model.recomputes_selectively else 1
    mlp = size * model.ffn_hidden_size * ((2 if model.swiglu else 1) + kept)
    inputs = 2 * size * hidden * kept
    if experts > 1:
        return (
            attention // tp + _between(model, size * hidden * kept) + _experts_bytes(model, mlp // tp, experts, tokens)
        )
    # The same on every rank, or each rank's part of the sequence.
    return _between(model, inputs) // (tp if sequence_parallel else 1) + (attention + mlp) // tp


def _between(model: ModelConfig, inputs: int) -> int:
    masks = 2 * model.hidden_size if model.hidden_dropout else 0  # a byte per element, as CUDA's kernel stores them
    return inputs + 2 * norm_bytes(model) + masks


def _experts_bytes(model: ModelConfig, mlp: int, experts: int, tokens: int) -> int:
    """Bytes of a mixture of experts per token, where one of its MLPs keeps `mlp` bytes of each token.

    Experts keep their slots, used or not; without a limit of their tokens, as many as if all are used equally. What the
    gate keeps of each token and expert: its probability.
    """
    size, hidden = ELEMENT_SIZE[model.params_dtype], model.hidden_size
    capacity = model.expert_capacity(tokens, experts, training=True)
    slots = model.topk if capacity is None else experts * capacity / tokens
    kept = 0 if model.recomputes_selectively else 1
    of_gate = _FP32 * hidden if size < _FP32 else size * hidden * kept
    found = of_gate + _FP32 * experts + slots * (mlp + size * hidden) + model.topk * size * hidden
    if model.has_residual_mlp:  # its input, unless the gate keeps that, and the two results
        found += mlp + 2 * size * hidden + (size * hidden * kept if size < _FP32 else 0)
    return round(found)


def norm_bytes(model: ModelConfig) -> int:
    """Bytes of a normalisation, per token: its input, and one statistic in fp32 of rmsnorm, two of layernorm."""
    statistics = 1 if model.normalization == "rmsnorm" else 2
    return ELEMENT_SIZE[model.params_dtype] * model.hidden_size + statistics * _FP32


def attention_bias_bytes(model: ModelConfig, parts: int) -> int:
    """Bytes of the table of ALiBi for one of `parts` of the heads, which all layers share (megatron/model/alibi.py)."""
    if not model.uses_alibi:
        return 0
    return ELEMENT_SIZE[model.params_dtype] * model.num_attention_heads // parts * model.seq_length**2


def head_bytes(model: ModelConfig, padded_vocab_size: int, tp: int, sequence_parallel: bool = False) -> int:
    """Bytes of the last normalisation and the head, per token: their inputs, and the logits in the training type.

    The gradient takes the place of the logits (megatron/parallel/cross_entropy.py). loss_chunk_bytes come in addition.
    """
    size = ELEMENT_SIZE[model.params_dtype]
    between = (norm_bytes(model) + size * model.hidden_size) // (tp if sequence_parallel else 1)
    return between + size * padded_vocab_size // tp


def loss_chunk_bytes(tokens: int, padded_vocab_size: int, tp: int) -> int:
    """Bytes of the part of the logits of a micro batch of `tokens` tokens that the loss has in fp32 at a time."""
    row = _FP32 * padded_vocab_size // tp
    return row * min(tokens, max(1, LOSS_CHUNK_BYTES // row))


def in_flight(config: Config, stage: int) -> int:
    """Micro batches whose activations a stage holds at once: DeepSpeed's schedule, 1F1B (PipeDream-Flush)."""
    parallel, training = config.parallel, config.training
    micro_batches = training.global_batch_size // (training.micro_batch_size * parallel.data_parallel_size)
    return min(parallel.pipeline_model_parallel_size - stage, max(micro_batches, 1))


def _experts_of(config: Config, layers: int, stage: int) -> list[int]:
    """Experts of each of the `layers` transformer layers of a stage, which those of earlier stages precede."""
    stages = config.parallel.pipeline_model_parallel_size
    first = stage_bounds(config.model.num_layers, stages)[stage] - 2 if stage else 0
    return config.model.experts_per_layer[first : first + layers]


def activation_bytes(config: Config, padded_vocab_size: int, layers: int, stage: int) -> int:
    """Bytes that a rank of pipeline stage `stage`, which has `layers` transformer layers, holds at its peak.

    With --checkpoint-activations: the input of each chunk of every micro batch in flight, and all of one chunk.
    """
    model, parallel = config.model, config.parallel
    tp, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    parts = parallel.ds_sequence_parallel_size
    tokens = config.training.micro_batch_size * model.seq_length // parts
    split = parallel.splits_sequence
    boundary = ELEMENT_SIZE[model.params_dtype] * model.hidden_size // (tp if split else 1)
    of_layers = [
        layer_bytes(model, tp, split, experts=experts, tokens=tokens, exchanges=parts > 1)
        for experts in _experts_of(config, layers, stage)
    ]
    kept, once = sum(of_layers), 0
    if model.checkpoint_activations:
        chunk = min(model.checkpoint_num_layers, layers)
        saved = boundary // tp if parallel.partition_activations else boundary
        kept = 0 if parallel.checkpoint_in_cpu else -(-layers // max(chunk, 1)) * saved
        once = chunk * max(of_layers, default=0)
    if model.embed_layernorm and stage == 0:
        kept += norm_bytes(model) // (tp if split else 1)
    kept += boundary * ((stage > 0) + (stage < stages - 1))  # DeepSpeed's receive and send buffers
    of_loss = 0
    if stage == stages - 1:
        once += head_bytes(model, padded_vocab_size, tp, split)
        of_loss = loss_chunk_bytes(tokens, padded_vocab_size, tp)
    of_bias = attention_bias_bytes(model, tp * parts) if layers else 0
    return tokens * (in_flight(config, stage) * kept + once) + of_loss + of_bias
