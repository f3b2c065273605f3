"""The model: sizes, variants, numerics."""

from __future__ import annotations

import dataclasses
import math

from megatron.config.errors import ConfigError, require_one_of
from megatron.config.flags import REQUIRED, FlagGroup, flag

PARAMS_DTYPES = ("bf16", "fp16", "fp32")
ABSOLUTE, ROTARY, ALIBI, NO_POSITIONS = POSITION_EMBEDDING_TYPES = ("absolute", "rotary", "alibi", "none")

OF_EXPERTS = (
    "num_experts", "expert_interval", "topk", "mlp_type", "moe_train_capacity_factor", "moe_eval_capacity_factor",
    "moe_min_capacity", "moe_token_dropping", "moe_top2_2nd_expert_sampling", "moe_loss_coeff",
    "moe_expert_parallel_size",
)  # fmt: skip
"""Settings that mean nothing in a dense model."""


def position_embedding_type(rotary: bool, table: bool) -> str:
    """What a model has that says only --use-rotary-position-embeddings, and whether not --no-position-embedding."""
    return ROTARY if rotary else ABSOLUTE if table else NO_POSITIONS


def default_ffn_hidden_size(hidden_size: int, swiglu: bool) -> int:
    """Upstream's default: 4h, or with SwiGLU 2/3 of it rounded down to a multiple of 64."""
    return int((4 * hidden_size * 2 / 3) / 64) * 64 if swiglu else 4 * hidden_size


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int) -> int:
    """The smallest multiple of (make_vocab_size_divisible_by x TP) that holds `vocab_size` tokens.

    The result is divisible by the tensor parallel size by construction.
    """
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(FlagGroup):
    """Model: sizes and variants of the GPT."""

    num_layers: int = flag(REQUIRED, "number of transformer layers", least=1)
    hidden_size: int = flag(REQUIRED, "width of the residual stream", least=1)
    ffn_hidden_size: int = flag(
        None, "width of the MLP (default: 4h; with --swiglu 8/3 h, down to a multiple of 64)", least=1
    )
    num_attention_heads: int = flag(REQUIRED, "number of query heads", least=1)
    num_key_value_heads: int = flag(None, "number of key/value heads (default: as many as query heads)", least=1)
    kv_channels: int = flag(None, "size of one attention head (default: hidden size / attention heads)", least=1)
    seq_length: int = flag(REQUIRED, "tokens per sample", least=1)
    max_position_embeddings: int = flag(None, "rows of the position table (default: --seq-length)")
    position_embedding_type: str = flag(
        None,
        "absolute: a learned table, the default; rotary: as --use-rotary-position-embeddings; alibi: attention scores "
        "are lowered in proportion to the distance (arXiv:2108.12409); none: as --no-position-embedding",
        choices=POSITION_EMBEDDING_TYPES,
    )
    use_rotary_position_embeddings: bool = flag(False, "rotary instead of learned position embeddings")
    rotary_percent: float = flag(1.0, "part of each head that is rotated, in (0, 1]")
    rope_theta: int = flag(
        10000, "base of the rotary frequencies", names=("--rotary-position-embeddings-theta",), least=1
    )
    add_position_embedding: bool = flag(
        True, "no learned position embeddings; implied by rotary and alibi", names=("--no-position-embedding",)
    )
    embed_layernorm: bool = flag(False, "LayerNorm of the word embeddings, as in BLOOM")
    normalization: str = flag("layernorm", "kind of normalization", choices=("layernorm", "rmsnorm"))
    layernorm_epsilon: float = flag(1e-5, "epsilon of the normalization, of either kind", above=0)
    swiglu: bool = flag(False, "gated SiLU in the MLP instead of GELU")
    bias_gelu_fusion: bool = flag(
        True,
        "exact GELU. Upstream's fused bias+GELU, its default, computes the tanh approximation, and so does "
        "this fork: the flag changes the function, not the kernel",
        names=("--no-bias-gelu-fusion",),
    )
    num_experts: tuple[int, ...] = flag(
        (1,),
        "experts of the MLP of each layer that has more than one, by --expert-interval, or a number for each of these "
        "layers; --moe-expert-parallel-size divides them over data-parallel ranks",
    )
    expert_interval: int = flag(2, "every so many layers one has experts", least=1)
    topk: int = flag(1, "experts of each token, 1 or 2", least=1)
    mlp_type: str = flag(
        "standard",
        "residual: a token passes an MLP that all share beside its expert (arXiv:2201.05596)",
        choices=("standard", "residual"),
    )
    moe_train_capacity_factor: float = flag(
        1.0,
        "tokens that an expert takes: this times its equal share, rounded up; others pass by the layer (no limit: "
        "--disable-moe-token-dropping)",
        above=0,
    )
    moe_eval_capacity_factor: float = flag(1.0, "the same in evaluations", above=0)
    moe_min_capacity: int = flag(4, "an expert takes at least so many tokens", least=0)
    moe_token_dropping: bool = flag(True, "experts take all tokens", names=("--disable-moe-token-dropping",))
    moe_top2_2nd_expert_sampling: bool = flag(
        True,
        "with --topk 2 the second most probable expert, instead of one drawn by the probabilities",
        names=("--disable-moe-top2-2nd-expert-sampling",),
    )
    moe_loss_coeff: float = flag(0.1, "factor of the loss that keeps experts equally used", least=0)
    untie_embeddings_and_output_weights: bool = flag(False, "separate weights for the LM head")
    add_bias_linear: bool = flag(True, "no biases in linear layers", names=("--disable-bias-linear",))
    attention_dropout: float = flag(0.1, "dropout of the attention probabilities", below=1)
    hidden_dropout: float = flag(0.1, "dropout of the embeddings and of each residual branch", below=1)
    init_method_std: float = flag(0.02, "standard deviation of the initial weights", above=0)
    make_vocab_size_divisible_by: int = flag(128, "the vocabulary is padded to a multiple of this times TP", least=1)
    checkpoint_activations: bool = flag(False, "recompute activations in the backward pass")
    checkpoint_num_layers: int = flag(1, "layers per recomputed chunk; needs --checkpoint-activations", least=1)
    recompute_granularity: str | None = flag(
        None,
        "full: as --checkpoint-activations; selective: only what is large and cheap to recompute, the results of "
        "normalizations and of the MLP's activation function, while attention keeps no score matrix anyway",
        names=("--recompute-granularity", "--activations-checkpoint-granularity"),
        choices=("full", "selective"),
    )
    recompute_activations: bool = flag(False, "as --recompute-granularity selective")
    recompute_method: str | None = flag(
        None,
        "how --recompute-granularity full, which it implies, forms chunks: uniform is the only way",
        names=("--recompute-method", "--activations-checkpoint-method"),
        choices=("uniform",),
    )
    recompute_num_layers: int | None = flag(
        None,
        "as --checkpoint-num-layers, with --recompute-granularity full",
        names=("--recompute-num-layers", "--activations-checkpoint-num-layers"),
        least=1,
    )
    params_dtype: str = "fp32"  # from --bf16 and --fp16, which exclude each other

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_experts", tuple(self.num_experts))
        self.check_values()
        self._fill_defaults()
        self.check_values()  # those that were filled in
        self._resolve_recomputation()
        if self.num_attention_heads % self.num_key_value_heads:
            heads = self.num_attention_heads
            self.refuse("num_key_value_heads", f"must divide --num-attention-heads {heads}")
        if self.checkpoint_num_layers > 1 and not self.checkpoint_activations:
            self.refuse("checkpoint_num_layers", "add --checkpoint-activations")
        self._check_positions()
        self._check_experts()
        if self.embed_layernorm and self.normalization != "layernorm":
            raise ConfigError(
                f"--embed-layernorm is a LayerNorm, and --normalization {self.normalization} says otherwise: drop one "
                "of them"
            )
        require_one_of("params_dtype", self.params_dtype, PARAMS_DTYPES)

    @property
    def bf16(self) -> bool:
        return self.params_dtype == "bf16"

    @property
    def fp16(self) -> bool:
        return self.params_dtype == "fp16"

    @property
    def recomputes_selectively(self) -> bool:
        """--recompute-granularity selective, or --recompute-activations."""
        return self.recompute_granularity == "selective" or self.recompute_activations

    @property
    def gelu_approximate(self) -> str:
        """What `torch.nn.functional.gelu(approximate=...)` takes: "tanh" or "none"."""
        return "tanh" if self.bias_gelu_fusion else "none"

    @property
    def uses_alibi(self) -> bool:
        """--position-embedding-type alibi."""
        return self.position_embedding_type == ALIBI

    @property
    def has_experts(self) -> bool:
        """Whether a layer has more than one expert."""
        return any(experts > 1 for experts in self.experts_per_layer)

    @property
    def has_residual_mlp(self) -> bool:
        """--mlp-type residual."""
        return self.mlp_type == "residual"

    @property
    def experts_per_layer(self) -> list[int]:
        """Experts of the MLP of each layer; 1: an MLP without a gate."""
        number = self.num_layers // self.expert_interval
        given = self.num_experts * number if len(self.num_experts) == 1 else self.num_experts
        found = [1] * self.num_layers
        found[self.expert_interval - 1 :: self.expert_interval] = given
        return found

    def mlps_of_a_token(self, experts: int) -> int:
        """How many MLPs a token passes in a layer with so many experts, if none drops it."""
        return 1 if experts == 1 else self.topk + self.has_residual_mlp

    def expert_capacity(self, tokens: int, experts: int, *, training: bool) -> int | None:
        """How many of the `tokens` of a micro batch one of `experts` takes; None: all that are sent to it."""
        if not self.moe_token_dropping:
            return None
        factor = self.moe_train_capacity_factor if training else self.moe_eval_capacity_factor
        return min(tokens, max(math.ceil(tokens / experts * factor * self.topk), self.moe_min_capacity, 1))

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that are rotated; 0 without rotary embeddings."""
        return int(self.kv_channels * self.rotary_percent) if self.use_rotary_position_embeddings else 0

    def _fill_defaults(self) -> None:
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            why = f"not divisible by --num-attention-heads {heads}; change one or give --kv-channels"
            self.refuse("hidden_size", why)
        defaults = {
            "ffn_hidden_size": default_ffn_hidden_size(self.hidden_size, self.swiglu),
            "num_key_value_heads": self.num_attention_heads,
            "kv_channels": self.hidden_size // self.num_attention_heads,
            "max_position_embeddings": self.seq_length,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._resolve_positions()
        if self.swiglu or not self.add_bias_linear:
            object.__setattr__(self, "bias_gelu_fusion", False)

    def _resolve_positions(self) -> None:
        """Make the three settings of position embeddings say the same, and refuse them where they do not."""
        rotary, table = self.use_rotary_position_embeddings, self.add_position_embedding
        kind = self.position_embedding_type or position_embedding_type(rotary, table)
        wrong = "--use-rotary-position-embeddings" if rotary and kind != ROTARY else None
        if wrong or (kind == ABSOLUTE and not table):
            self.refuse("position_embedding_type", f"{wrong or '--no-position-embedding'} says otherwise; drop one")
        resolved = {
            "position_embedding_type": kind,
            "use_rotary_position_embeddings": kind == ROTARY,
            "add_position_embedding": kind == ABSOLUTE,
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)

    def _resolve_recomputation(self) -> None:
        """Turn the --recompute flags into checkpoint_activations and checkpoint_num_layers."""
        if self.recompute_activations and self.recompute_granularity == "full":
            raise ConfigError(
                "--recompute-activations is --recompute-granularity selective, and full is given: drop one of them"
            )
        if self.recomputes_selectively:
            if self.recompute_method is not None:
                self.refuse("recompute_method", "is for --recompute-granularity full")
            if self.checkpoint_activations:
                raise ConfigError(
                    "--checkpoint-activations recomputes whole layers, and --recompute-granularity selective (or "
                    "--recompute-activations) parts of them: drop one of them"
                )
        elif self.recompute_granularity == "full" or self.recompute_method is not None:
            object.__setattr__(self, "checkpoint_activations", True)
        if self.recompute_num_layers is None:
            return
        if not self.checkpoint_activations:
            self.refuse("recompute_num_layers", "add --recompute-granularity full")
        if self.checkpoint_num_layers not in (1, self.recompute_num_layers):
            other = f"--checkpoint-num-layers {self.checkpoint_num_layers}"
            self.refuse("recompute_num_layers", f"{other} says otherwise; drop one of them")
        object.__setattr__(self, "checkpoint_num_layers", self.recompute_num_layers)

    def _check_experts(self) -> None:
        shown = " ".join(map(str, self.num_experts))
        layers = self.num_layers // self.expert_interval
        if max(self.num_experts, default=0) > 1 and layers == 0:
            self.refuse("expert_interval", f"is more than --num-layers {self.num_layers}, so no layer has experts")
        if len(self.num_experts) not in (1, layers):
            raise ConfigError(
                f"--num-experts {shown}: give one number, or one for each of the {layers} layers with experts, every "
                f"{self.expert_interval} (--expert-interval) of --num-layers {self.num_layers}"
            )
        if min(self.num_experts, default=0) < 1:
            raise ConfigError(f"--num-experts {shown}: each must be at least 1")
        if len(set(self.num_experts)) == 1:  # the same model, whichever way it was given
            object.__setattr__(self, "num_experts", self.num_experts[:1])
        fewest = min((experts for experts in self.num_experts if experts > 1), default=self.topk)
        if self.topk > min(fewest, 2):
            self.refuse("topk", "a token goes to 1 or 2 experts")
        if self.has_residual_mlp and not self.has_experts:
            self.refuse("mlp_type", "the model is dense; give --num-experts N, more than 1")

    def _check_positions(self) -> None:
        if self.max_position_embeddings < self.seq_length:
            why = f"is less than --seq-length {self.seq_length}; raise it or shorten the samples"
            self.refuse("max_position_embeddings", why)
        if not 0.0 < self.rotary_percent <= 1.0:
            self.refuse("rotary_percent", "must be in (0, 1]")
        if not self.use_rotary_position_embeddings:
            for name, default in (("rotary_percent", 1.0), ("rope_theta", 10000)):
                if getattr(self, name) != default:
                    self.refuse(name, "add --use-rotary-position-embeddings")
        elif self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ConfigError(
                f"--rotary-percent {self.rotary_percent} of --kv-channels {self.kv_channels} rotates "
                f"{self.rotary_dim} channels: rotary embeddings need an even number, at least 2; change one"
            )
