"""config.json of a Hugging Face model, made from our model and read into one.

A model is written only if the architecture there computes the same function of the same weights, and read only if ours
does: what cannot be said exactly is refused by the name of the flag or of the key.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config import ConfigError, ModelConfig
from megatron.config.model import ALIBI
from megatron.hf.errors import ConversionError
from megatron.hf.tensors import BLOOM, GPT2, LLAMA

CONFIG = "config.json"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""--params-dtype -> torch's name."""
_MISTRAL = "MistralForCausalLM"
_READ = {"llama": (LLAMA, LLAMA), "mistral": (LLAMA, _MISTRAL), "gpt2": (GPT2, GPT2), "bloom": (BLOOM, BLOOM)}
# The models without their heads, which are the word embeddings if these are tied.
_HEADLESS = {GPT2: "GPT2Model", BLOOM: "BloomModel"}
# What transformers' classes take for a key that is absent, where that is not what null says.
_ABSENT = {"mistral": {"sliding_window": 4096, "num_key_value_heads": 8}}
# Keys of BLOOM's first versions, and the names that they have now.
_RENAMED = {"bloom": {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}}
_LAYERS = {LLAMA: "num_hidden_layers", GPT2: "n_layer", BLOOM: "n_layer"}
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh")
_EXACT_GELU = "gelu"
_BLOOM_FFN = 4  # its MLP is so many times as wide as its residual stream
_BLOOM_LENGTH = 2048  # tokens of a sample of BLOOM's training, where config.json does not say it: ALiBi has no limit
_GPT2_FIXED = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}  # fmt: skip


def architecture_of(model: ModelConfig) -> str:
    """The architecture that computes what `model` does. Raises ConversionError naming each flag that none has."""
    if model.use_rotary_position_embeddings:
        name, kind, wrong = LLAMA, "rotary embeddings", _not_of_llama(model)
    elif model.uses_alibi:
        name, kind, wrong = BLOOM, "ALiBi", _not_of_bloom(model)
    else:
        name, kind, wrong = GPT2, "no rotary embeddings", _not_of_gpt2(model)
    wrong[f"--num-experts {' '.join(map(str, model.num_experts))}"] = model.has_experts
    flags = [flag for flag, is_wrong in wrong.items() if is_wrong]
    if flags:
        raise ConversionError(
            f"{', '.join(flags)}: {name}, which hf-convert writes for a model with {kind}, cannot express it "
            "exactly; export a model that was trained otherwise"
        )
    return name


def _not_of_llama(model: ModelConfig) -> dict[str, bool]:
    """Flag -> whether LLaMA cannot express it."""
    heads = f"--num-attention-heads {model.num_attention_heads}"
    return {
        f"--normalization {model.normalization}": model.normalization != "rmsnorm",
        "no --swiglu": not model.swiglu,
        f"--rotary-percent {model.rotary_percent}": model.rotary_dim != model.kv_channels,
        f"{heads}, which does not divide --hidden-size {model.hidden_size}": bool(
            model.hidden_size % model.num_attention_heads
        ),
        "--embed-layernorm": model.embed_layernorm,
    }


def _not_of_either(model: ModelConfig) -> dict[str, bool]:
    """Of GPT-2 and BLOOM, as _not_of_llama."""
    return {
        f"--normalization {model.normalization}": model.normalization != "layernorm",
        "--swiglu": model.swiglu,
        "--disable-bias-linear": not model.add_bias_linear,
        f"--num-key-value-heads {model.num_key_value_heads}": model.num_key_value_heads != model.num_attention_heads,
        f"--kv-channels {model.kv_channels}": model.kv_channels * model.num_attention_heads != model.hidden_size,
    }


def _not_of_gpt2(model: ModelConfig) -> dict[str, bool]:
    return {
        "--no-position-embedding": not model.add_position_embedding,
        "--embed-layernorm": model.embed_layernorm,
        **_not_of_either(model),
    }


def _not_of_bloom(model: ModelConfig) -> dict[str, bool]:
    wide = model.ffn_hidden_size == _BLOOM_FFN * model.hidden_size
    return {
        "no --embed-layernorm": not model.embed_layernorm,
        **_not_of_either(model),
        "--no-bias-gelu-fusion": not (model.bias_gelu_fusion or model.swiglu) and model.add_bias_linear,
        f"--ffn-hidden-size {model.ffn_hidden_size}": not (wide or model.swiglu),
    }


def config_of(model: ModelConfig, architecture: str, vocab_size: int, end_of_text: int | None) -> dict[str, Any]:
    """config.json of `model`. `end_of_text`: the token that ends documents; None if it is not known."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "vocab_size": vocab_size,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "bos_token_id": end_of_text if architecture == GPT2 else None,
        "eos_token_id": end_of_text,
        "torch_dtype": DTYPES[model.params_dtype],
        "use_cache": True,
    }
    if architecture == GPT2:
        return config | {
            "model_type": "gpt2",
            "n_positions": model.max_position_embeddings,
            "n_embd": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "n_inner": model.ffn_hidden_size,
            "activation_function": _TANH_GELU[0] if model.bias_gelu_fusion else _EXACT_GELU,
            "layer_norm_epsilon": model.layernorm_epsilon,
            "attn_pdrop": model.attention_dropout,
            "resid_pdrop": model.hidden_dropout,
            "embd_pdrop": model.hidden_dropout,
        }
    if architecture == BLOOM:
        return config | {
            "model_type": "bloom",
            "seq_length": model.seq_length,  # as BigScience's own have it; transformers does not read it
            "hidden_size": model.hidden_size,
            "n_layer": model.num_layers,
            "n_head": model.num_attention_heads,
            "layer_norm_epsilon": model.layernorm_epsilon,
            "attention_dropout": model.attention_dropout,
            "hidden_dropout": model.hidden_dropout,
        }
    theta = float(model.rope_theta)
    return config | {
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.layernorm_epsilon,
        "rope_theta": theta,  # of transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},  # of transformers 5
        "attention_bias": model.add_bias_linear,
        "mlp_bias": model.add_bias_linear,
        "attention_dropout": model.attention_dropout,
    }


class ConfigFile:
    """The values of a config.json that is imported."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        """Raises ConversionError for an architecture that this model does not compute."""
        self.path = path
        kind = values.get("model_type")
        self._values = values
        if type(kind) is not str or kind not in _READ:
            raise self.refusal("model_type", f"only {', '.join(_READ)} can be imported")
        renamed = _RENAMED.get(kind, {})
        now = {renamed[key]: value for key, value in values.items() if key in renamed and value is not None}
        self._values = {**_ABSENT.get(kind, {}), **values, **now}
        self.architecture, wanted = _READ[kind]
        classes = values.get("architectures")
        headless = _HEADLESS.get(self.architecture)
        if headless is not None and classes == [headless] and not self._flag("tie_word_embeddings", True):
            raise self.refusal("architectures", f"it lacks the head, which is not tied: only {wanted} can be imported")
        if classes is not None and classes not in ([wanted], [headless]):
            raise self.refusal("architectures", f"only {wanted} can be imported")
        if values.get("quantization_config") is not None:
            raise self.refusal("quantization_config", "import the model before its quantization")

    def refusal(self, key: str, why: str) -> ConversionError:
        """The error for the value of `key`."""
        return ConversionError(f"{self.path}: {key} is {self._values.get(key)!r}: {why}")

    @property
    def vocab_size(self) -> int:
        return self._integer("vocab_size")

    def model(self, most_layers: int) -> ModelConfig:
        """The model that computes the same, of weights in fp32.

        `most_layers`: how many there can be. Raises ConversionError naming the key that ours has no flag for.
        """
        values = {LLAMA: self._llama, GPT2: self._gpt2, BLOOM: self._bloom}[self.architecture]()
        if values["num_layers"] > most_layers:
            raise self.refusal(
                _LAYERS[self.architecture], f"there are only {most_layers} tensors; both must be of one model"
            )
        positions = values["max_position_embeddings"]
        try:
            return ModelConfig(**values, seq_length=positions)
        except ConfigError as exc:
            raise ConversionError(f"{self.path}: as flags of this trainer: {exc}") from exc

    def _llama(self) -> dict[str, Any]:
        self._must_be("hidden_act", "silu")
        biases = self._flag("attention_bias"), self._flag("mlp_bias")
        if biases[0] != biases[1]:
            raise self.refusal("attention_bias", f"mlp_bias is {biases[1]}, and here all linear layers are alike")
        heads = self._integer("num_attention_heads")
        hidden, positions = self._integer("hidden_size"), self._integer("max_position_embeddings")
        # Mistral's window, where attention ends; of no effect if it is as long as a text can be.
        window = self._values.get("sliding_window")
        if window is not None and not (type(window) is int and window >= positions):
            why = "attention has no window here; only null can be imported (and an absent key is 4096 for Mistral)"
            raise self.refusal("sliding_window", why)
        return {
            "num_layers": self._integer(_LAYERS[LLAMA]),
            "hidden_size": hidden,
            "ffn_hidden_size": self._integer("intermediate_size"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._integer("num_key_value_heads", heads),
            "kv_channels": self._integer("head_dim", hidden // heads),
            "max_position_embeddings": positions,
            "use_rotary_position_embeddings": True,
            "rope_theta": self._theta(),
            "normalization": "rmsnorm",
            "layernorm_epsilon": self._number("rms_norm_eps", 1e-6),
            "attention_dropout": self._number("attention_dropout", 0.0, 0.0),
            "hidden_dropout": 0.0,
            "init_method_std": self._number("initializer_range", 0.02),
            "swiglu": True,
            "untie_embeddings_and_output_weights": not self._flag("tie_word_embeddings"),
            "add_bias_linear": biases[0],
        }

    def _gpt2(self) -> dict[str, Any]:
        for key, value in _GPT2_FIXED.items():
            self._must_be(key, value)
        activation = self._values.get("activation_function", _TANH_GELU[0])
        if activation not in (*_TANH_GELU, _EXACT_GELU):
            raise self.refusal("activation_function", f"only {', '.join(_TANH_GELU)} and {_EXACT_GELU} are here")
        hidden = self._integer("n_embd")
        return {
            "num_layers": self._integer(_LAYERS[GPT2]),
            "hidden_size": hidden,
            "ffn_hidden_size": self._integer("n_inner", 4 * hidden),
            "num_attention_heads": self._integer("n_head"),
            "max_position_embeddings": self._integer("n_positions"),
            "layernorm_epsilon": self._number("layer_norm_epsilon", 1e-5),
            "attention_dropout": self._number("attn_pdrop", 0.1, 0.0),
            "hidden_dropout": self._number("resid_pdrop", 0.1, 0.0),
            "init_method_std": self._number("initializer_range", 0.02),
            "bias_gelu_fusion": activation != _EXACT_GELU,
            "untie_embeddings_and_output_weights": not self._flag("tie_word_embeddings", True),
        }

    def _bloom(self) -> dict[str, Any]:
        self._must_be("apply_residual_connection_post_layernorm", False)
        return {
            "num_layers": self._integer(_LAYERS[BLOOM]),
            "hidden_size": self._integer("hidden_size"),
            "num_attention_heads": self._integer("n_head"),
            "max_position_embeddings": self._integer("seq_length", _BLOOM_LENGTH),
            "position_embedding_type": ALIBI,
            "embed_layernorm": True,
            "layernorm_epsilon": self._number("layer_norm_epsilon", 1e-5),
            "attention_dropout": self._number("attention_dropout", 0.0, 0.0),
            "hidden_dropout": self._number("hidden_dropout", 0.0, 0.0),
            "init_method_std": self._number("initializer_range", 0.02),
            "untie_embeddings_and_output_weights": not self._flag("tie_word_embeddings", True),
        }

    def _theta(self) -> int:
        """Base of the rotary frequencies, without any scaling."""
        rope = self._values.get("rope_parameters") or {}
        for key in ("rope_parameters", "rope_scaling"):
            given = self._values.get(key) or {}
            if not isinstance(given, dict) or given.get("rope_type", given.get("type", "default")) != "default":
                raise self.refusal(key, "rotary frequencies are not scaled here; import a model of rope_type default")
        for part in (rope.get("partial_rotary_factor"), self._values.get("partial_rotary_factor")):
            if part not in (None, 1.0):
                raise self.refusal("partial_rotary_factor", "LLaMA rotates whole heads; only 1.0 can be imported")
        theta = rope.get("rope_theta", self._values.get("rope_theta", 10000))
        if type(theta) not in (int, float) or not 1 <= theta <= sys.float_info.max or theta != int(theta):
            raise self.refusal("rope_theta", "--rotary-position-embeddings-theta is a whole number")
        return int(theta)

    def _must_be(self, key: str, value: Any) -> None:
        if self._values.get(key, value) != value:
            raise self.refusal(key, f"only {value!r} can be imported")

    def _flag(self, key: str, default: bool = False) -> bool:
        value = self._values.get(key, default)
        if type(value) is not bool:
            raise self.refusal(key, "must be true or false")
        return value

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.refusal(key, "must be a whole number from 1 on")
        return value

    def _number(self, key: str, default: float, least: float = 1e-300) -> float:
        value = self._values.get(key, default)
        if type(value) not in (int, float) or not least <= value <= sys.float_info.max:
            raise self.refusal(key, f"must be a number {'from 0 on' if least == 0 else 'above 0'}")
        return float(value)


def flags_of(model: ModelConfig) -> str:
    """The flags with which the trainer builds `model`, as a shell takes them."""
    flags = [
        "--num-layers", model.num_layers, "--hidden-size", model.hidden_size,
        "--ffn-hidden-size", model.ffn_hidden_size, "--num-attention-heads", model.num_attention_heads,
        "--num-key-value-heads", model.num_key_value_heads, "--kv-channels", model.kv_channels,
        "--seq-length", model.seq_length, "--max-position-embeddings", model.max_position_embeddings,
        "--normalization", model.normalization, "--layernorm-epsilon", model.layernorm_epsilon,
        "--attention-dropout", model.attention_dropout, "--hidden-dropout", model.hidden_dropout,
        "--init-method-std", model.init_method_std,
    ]  # fmt: skip
    if model.use_rotary_position_embeddings:
        flags += ["--use-rotary-position-embeddings", "--rotary-position-embeddings-theta", model.rope_theta]
    flags += ["--position-embedding-type", ALIBI] if model.uses_alibi else []
    flags += ["--embed-layernorm"] if model.embed_layernorm else []
    flags += ["--swiglu"] if model.swiglu else [] if model.bias_gelu_fusion else ["--no-bias-gelu-fusion"]
    flags += ["--untie-embeddings-and-output-weights"] if model.untie_embeddings_and_output_weights else []
    flags += [] if model.add_bias_linear else ["--disable-bias-linear"]
    flags += [] if model.params_dtype == "fp32" else [f"--{model.params_dtype}"]
    return shlex.join(map(str, flags))
