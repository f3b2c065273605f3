"""Which tensors of a Hugging Face model each parameter of ours becomes; the same table serves both directions."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.config import ModelConfig
from megatron.parallel.parameter_slice import ParameterSlice

if TYPE_CHECKING:
    import torch

LLAMA = "LlamaForCausalLM"
GPT2 = "GPT2LMHeadModel"
BLOOM = "BloomForCausalLM"

_QUERY_KEY_VALUE = "self_attention.query_key_value"
_FUSED = 3  # query, key, value

# Modules of a transformer block, and what each is called there. Several names: fused here, apart there.
_BLOCKS = {
    LLAMA: {
        "input_layernorm": ("input_layernorm",),
        _QUERY_KEY_VALUE: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attention.dense": ("self_attn.o_proj",),
        "post_attention_layernorm": ("post_attention_layernorm",),
        "mlp.dense_h_to_4h": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.dense_4h_to_h": ("mlp.down_proj",),
    },
    GPT2: {
        "input_layernorm": ("ln_1",),
        _QUERY_KEY_VALUE: ("attn.c_attn",),
        "self_attention.dense": ("attn.c_proj",),
        "post_attention_layernorm": ("ln_2",),
        "mlp.dense_h_to_4h": ("mlp.c_fc",),
        "mlp.dense_4h_to_h": ("mlp.c_proj",),
    },
}
_BLOCKS[BLOOM] = {module: (module,) for module in _BLOCKS[LLAMA]}  # its program gave them their names here, too
# word embedding, position embedding, blocks, final norm
_OTHERS = {
    LLAMA: ("model.embed_tokens", "", "model.layers", "model.norm"),
    GPT2: ("transformer.wte", "transformer.wpe", "transformer.h", "transformer.ln_f"),
    BLOOM: ("transformer.word_embeddings", "", "transformer.h", "transformer.ln_f"),
}
_NORM_OF_WORDS = "transformer.word_embeddings_layernorm"  # of BLOOM
_BASE = "transformer."
HEAD = "lm_head.weight"


def bare_names(architecture: str, tensors: Container[str]) -> bool:
    """Whether `tensors` have their names in the model without its head: GPT-2 and BLOOM are distributed so, too."""
    words = f"{_OTHERS[architecture][0]}.weight"
    return words.startswith(_BASE) and words.removeprefix(_BASE) in tensors


def with_base(name: str) -> str:
    """The name in the model with its head of a tensor that has its bare name."""
    return name if name == HEAD else _BASE + name


@dataclass(frozen=True)
class Parameter:
    """A parameter of ours, and its tensors in a Hugging Face model.

    `key`: in the state of pipeline layer `layer`. `part`: the full parameter, of TP 1; of a vocabulary with padding.
    `names`: one tensor for each of the `part.blocks`, or one alone. `transposed`: its dimensions are swapped there.
    `heads`: if not 0, rows are query, key and value of each of so many heads there; here all queries come first.
    """

    layer: int
    key: str
    part: ParameterSlice
    names: tuple[str, ...]
    transposed: bool = False
    heads: int = 0

    def written(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the parameter, as their tensor has them there; a view, where the order of rows is the same."""
        if self.heads:
            rows = rows.unflatten(0, (_FUSED, self.heads, -1)).transpose(0, 1).flatten(0, 2)
        return rows.T if self.transposed else rows

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of `written`."""
        if self.heads:
            tensor = tensor.unflatten(0, (self.heads, _FUSED, -1)).transpose(0, 1).flatten(0, 2)
        return tensor.T if self.transposed else tensor

    def rows(self, vocab_size: int) -> list[tuple[str, int, int]]:
        """(tensor, start, stop) along the first dimension of the parameter; rows of no token are left out."""
        if len(self.names) == 1:
            return [(self.names[0], 0, vocab_size if self.part.vocabulary else self.part.shape[0])]
        ends = [sum(self.part.blocks[: i + 1]) for i in range(len(self.part.blocks))]
        return [(name, end - block, end) for name, end, block in zip(self.names, ends, self.part.blocks, strict=True)]

    def shapes(self, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """Tensor -> its shape in the Hugging Face model."""
        shapes = {name: (stop - start, *self.part.shape[1:]) for name, start, stop in self.rows(vocab_size)}
        return {name: shape[::-1] if self.transposed else shape for name, shape in shapes.items()}


def parameters(model: ModelConfig, architecture: str, padded_vocab_size: int) -> list[Parameter]:
    """All parameters in the order of the pipeline layers."""
    words, positions, blocks, norm = _OTHERS[architecture]
    rows = ParameterSlice((padded_vocab_size, model.hidden_size), dim=0, blocks=(padded_vocab_size,), vocabulary=True)
    found = [Parameter(1, "word_embeddings.weight", rows, (f"{words}.weight",))]
    if model.embed_layernorm:
        norm_of_words = ParameterSlice((model.hidden_size,))
        found += [
            Parameter(1, f"word_embeddings.norm.{kind}", norm_of_words, (f"{_NORM_OF_WORDS}.{kind}",))
            for kind in ("weight", "bias")
        ]
    if model.add_position_embedding:
        table = ParameterSlice((model.max_position_embeddings, model.hidden_size))
        found.append(Parameter(1, "position_embeddings.weight", table, (f"{positions}.weight",)))
    for number in range(model.num_layers):
        for module, there in _BLOCKS[architecture].items():
            names = tuple(f"{blocks}.{number}.{name}" for name in there)
            found += _of_module(model, number + 2, module, names, architecture)
    last = model.num_layers + 2
    found += [
        Parameter(last, kind, ParameterSlice((model.hidden_size,)), (f"{norm}.{kind}",)) for kind in _norm_parts(model)
    ]
    if model.untie_embeddings_and_output_weights:
        found.append(Parameter(last + 1, HEAD, rows, (HEAD,)))
    return found


def _of_module(
    model: ModelConfig, layer: int, module: str, names: tuple[str, ...], architecture: str
) -> Iterator[Parameter]:
    """The parameters of one module of a transformer block."""
    if module.endswith("layernorm"):
        for kind in _norm_parts(model):
            yield _parameter(layer, module, kind, ParameterSlice((model.hidden_size,)), names)
        return
    weight, bias = _linear(model, module)
    heads = model.num_attention_heads if architecture == BLOOM and module == _QUERY_KEY_VALUE else 0
    # GPT-2's linear layers are Conv1D there: [inputs, outputs].
    yield _parameter(layer, module, "weight", weight, names, transposed=architecture == GPT2, heads=heads)
    if model.add_bias_linear:
        yield _parameter(layer, module, "bias", bias, names, heads=heads)


def _parameter(
    layer: int, module: str, kind: str, part: ParameterSlice, names: tuple[str, ...], **there: Any
) -> Parameter:
    return Parameter(layer, f"{module}.{kind}", part, tuple(f"{name}.{kind}" for name in names), **there)


def _norm_parts(model: ModelConfig) -> tuple[str, ...]:
    return ("weight", "bias") if model.normalization == "layernorm" else ("weight",)


def _linear(model: ModelConfig, module: str) -> tuple[ParameterSlice, ParameterSlice]:
    """(weight, bias) of a linear layer of a block, as megatron/model/transformer.py splits them."""
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    query, kv = (model.kv_channels * heads for heads in (model.num_attention_heads, model.num_key_value_heads))
    if module in (_QUERY_KEY_VALUE, "mlp.dense_h_to_4h"):
        fused = (ffn, ffn) if model.swiglu else (ffn,)
        blocks = (query, kv, kv) if module.startswith("self") else fused
        rows = sum(blocks)
        return ParameterSlice((rows, hidden), 0, blocks), ParameterSlice((rows,), 0, blocks)
    columns = query if module.startswith("self") else ffn
    return ParameterSlice((hidden, columns), 1, (columns,)), ParameterSlice((hidden,))
