"""The tensors of a checkpoint by arithmetic, without torch: exact bytes of the tensors, without the files' headers.

The layout equals the one that plan.py finds with the trainer's code; a test compares them for models, layouts and
types. Standard library only.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.config import Config, ConfigError, ModelConfig
from megatron.parallel.parameter_slice import ParameterSlice
from megatron.parallel.topology import Coordinates, Layout

from ..common.formatting import size
from ..common.tables import text_table
from .kinds import MASTER_WEIGHTS, MOMENTS, TENSOR_KINDS, WEIGHTS
from .presets import Planned

NOTE = "tensors alone, exact to the byte, without the headers of files"
WITHOUT_TORCH = (
    f"torch is not installed: {NOTE}. Names and sizes of files need it: pip install '.[train]' in the checkout"
)
_ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
_FP32 = 4
_ALIGNMENT = 2  # elements, times DP: as in shard.py
_AROUND_BLOCKS = 4  # pipeline layers other than blocks: (none), embedding; final norm, head


@dataclass(frozen=True)
class RankTensors:
    """Bytes of the tensors that one rank writes, by kinds.TENSOR_KINDS, and its number of parameters.

    `divided`: how many of these belong to experts that are divided over so many data-parallel ranks.
    """

    rank: int
    at: Coordinates
    by_kind: dict[str, int]
    parameters: int
    divided: dict[int, int]


@dataclass(frozen=True)
class TensorPlan:
    """The tensors of all ranks."""

    layout: Layout
    config: Config
    vocab_sizes: tuple[int, int]
    ranks: tuple[RankTensors, ...]

    @property
    def by_kind(self) -> dict[str, int]:
        return {kind: sum(rank.by_kind[kind] for rank in self.ranks) for kind in TENSOR_KINDS}

    @property
    def parameters(self) -> int:
        """Of the model; those that tensor-parallel ranks all hold count once for each."""
        return sum(
            rank.parameters + sum((ranks - 1) * held for ranks, held in rank.divided.items())
            for rank in self.ranks
            if rank.at.dp == 0
        )


@dataclass(frozen=True)
class _Layer:
    """Elements of a pipeline layer's parameters on one rank: with weight decay, and without (biases and norms).

    `experts`: both again, of experts that are divided over so many data-parallel `ranks`.
    """

    decayed: int = 0
    plain: int = 0
    experts: tuple[int, int] = (0, 0)
    ranks: int = 1

    @property
    def shared(self) -> int:
        """Elements of which each data-parallel rank has the same."""
        return self.decayed + self.plain


def plan_tensors(planned: Planned) -> TensorPlan:
    """The tensors of `planned`.

    Raises ConfigError if there are fewer layers than stages, or TP cannot split a parameter.
    """
    config, layout, vocab_sizes = planned
    try:
        layers = _layers(config.model, vocab_sizes[1], layout.tp, layout.ep)
    except ValueError as exc:  # raised by ParameterSlice
        raise ConfigError(str(exc)) from exc
    bounds = stage_bounds(config.model.num_layers, layout.pp)
    by_stage = []
    for stage, (first, end) in enumerate(itertools.pairwise(bounds)):
        held = layers[first:end]
        last = stage == layout.pp - 1
        tied = not config.model.untie_embeddings_and_output_weights and last and layout.pp > 1
        copies = [_word_embedding(config.model, vocab_sizes[1], layout.tp)] if tied else []
        optimized = [*held, *copies]
        divided = {
            ranks: sum(sum(layer.experts) for layer in optimized if layer.ranks == ranks)
            for ranks in sorted({layer.ranks for layer in optimized} - {1})
        }
        parameters = sum(layer.shared for layer in optimized) + sum(divided.values())
        by_stage.append(
            [(_rank_bytes(config, layout.dp, dp, held, optimized), parameters, divided) for dp in range(layout.dp)]
        )
    ranks = []
    for rank, at in enumerate(map(layout.coordinates, range(layout.world_size))):
        ranks.append(RankTensors(rank, at, *by_stage[at.pp][at.dp]))
    return TensorPlan(layout, config, vocab_sizes, tuple(ranks))


def _rank_bytes(
    config: Config, dp: int, dp_rank: int, written: Iterable[_Layer], optimized: Sequence[_Layer]
) -> dict[str, int]:
    """What a rank of a stage writes, by kind; `written`: layers with files, `optimized`: these and tied copies."""
    found = dict.fromkeys(TENSOR_KINDS, 0)
    elements = sum(layer.shared for layer in written) if dp_rank == 0 else 0
    elements += sum(sum(layer.experts) for layer in written if dp_rank < layer.ranks)
    found[WEIGHTS] = elements * _ELEMENT_SIZE[config.model.params_dtype]
    if config.checkpoint.no_save_optim:
        return found
    moments = 2 if config.optimizer.optimizer == "adam" else int(config.optimizer.sgd_momentum > 0)
    groups = [(sum(layer.decayed for layer in optimized), 1), (sum(layer.plain for layer in optimized), 1)]
    for ranks in sorted({layer.ranks for layer in optimized} - {1}):
        alike = [layer.experts for layer in optimized if layer.ranks == ranks]
        groups += [(sum(elements), ranks) for elements in zip(*alike, strict=True)]
    for group, ranks in groups:
        # Each group is padded to a multiple of 2 x DP elements, and divided into DP equal partitions; divided experts
        # over the data-parallel ranks with the same ones.
        partition = -(-group // (_ALIGNMENT * (dp // ranks))) * _ALIGNMENT
        # The bf16 optimizer writes master weights with the padding, the other optimizer without it.
        kept = partition if config.model.bf16 else min(partition, max(0, group - dp_rank // ranks * partition))
        found[MASTER_WEIGHTS] += _FP32 * kept
        found[MOMENTS] += _FP32 * partition * moments
    return found


def _layers(model: ModelConfig, padded_vocab_size: int, tp: int, ep: int) -> list[_Layer]:
    """The pipeline layers as megatron.model.gpt_model numbers them."""
    hidden, ffn, bias = model.hidden_size, model.ffn_hidden_size, model.add_bias_linear
    query, kv = (model.kv_channels * heads for heads in (model.num_attention_heads, model.num_key_value_heads))
    attention = _linears(
        [((query + 2 * kv, hidden), 0, (query, kv, kv)), ((hidden, query), 1, (query,))], tp, bias=bias
    )
    mlp = _linears(
        [((ffn * (1 + model.swiglu), hidden), 0, (ffn,) * (1 + model.swiglu)), ((hidden, ffn), 1, (ffn,))],
        tp, bias=bias,
    )  # fmt: skip
    norm = hidden * (2 if model.normalization == "layernorm" else 1)
    embedding = _word_embedding(model, padded_vocab_size, tp)
    positions = model.max_position_embeddings * hidden if model.add_position_embedding else 0
    of_words = 2 * hidden if model.embed_layernorm else 0
    head = embedding if model.untie_embeddings_and_output_weights else _Layer()
    blocks = []
    for experts in model.experts_per_layer:
        routed = experts > 1
        ranks = min(ep, experts)
        held = experts // ranks
        mlps = (held if ranks == 1 else 0) + (routed and model.has_residual_mlp)
        divided = (held * mlp.decayed, held * mlp.plain) if ranks > 1 else (0, 0)
        gate = hidden * experts if routed else 0
        shares = 2 if routed and model.has_residual_mlp else 0
        decayed = attention.decayed + mlps * mlp.decayed + gate + shares * hidden
        blocks.append(_Layer(decayed, attention.plain + mlps * mlp.plain + shares + 2 * norm, divided, ranks))
    return [_Layer(), _Layer(embedding.decayed + positions, of_words), *blocks, _Layer(0, norm), head]


def _linears(matrices: Sequence[tuple[tuple[int, int], int, tuple[int, ...]]], tp: int, *, bias: bool) -> _Layer:
    """Linear layers, each (shape of the weight, dimension split over TP, matrices fused along it)."""
    weights = sum(_elements(ParameterSlice(*matrix, tp_size=tp)) for matrix in matrices)
    # The biases of matrices that are split by rows are split, the others are on every rank.
    biases = sum(shape[0] // tp if dim == 0 else shape[0] for shape, dim, _ in matrices) if bias else 0
    return _Layer(weights, biases)


def _word_embedding(model: ModelConfig, padded_vocab_size: int, tp: int) -> _Layer:
    shape = (padded_vocab_size, model.hidden_size)
    return _Layer(_elements(ParameterSlice(shape, 0, (padded_vocab_size,), tp_size=tp)))


def _elements(part: ParameterSlice) -> int:
    return math.prod(part.local_shape)


def stage_bounds(num_blocks: int, stages: int) -> list[int]:
    """First pipeline layer of each stage, and the end, as DeepSpeed balances them by the number of blocks.

    DeepSpeed chooses the partition with the least difference between the fullest and the emptiest stage; if several are
    equal, the one with the shortest last stage, then the shortest last but one, and so on (DeepSpeed 0.19,
    runtime/utils.py, partition_balanced). Raises ConfigError if there are no more layers than stages.
    """
    total = num_blocks + _AROUND_BLOCKS
    if total <= stages:
        raise ConfigError(f"--pipeline-model-parallel-size {stages}: more stages than the {num_blocks} layers can fill")
    before = [min(max(layer - 2, 0), num_blocks) for layer in range(total + 1)]  # blocks before each layer
    # For the first layers on a growing number of stages: blocks of the fullest and of the emptiest stage.
    best: dict[int, tuple[float, float]] = {0: (0.0, math.inf)}
    cuts: list[dict[int, int]] = []
    for stage in range(1, stages + 1):
        found: dict[int, tuple[float, float]] = {}
        cut_of: dict[int, int] = {}
        for end in range(stage, total + 1):
            for cut in range(end):
                if cut not in best:
                    continue
                blocks = before[end] - before[cut]
                candidate = max(best[cut][0], blocks), min(best[cut][1], blocks)
                if end not in found or candidate[0] - candidate[1] <= found[end][0] - found[end][1]:
                    found[end], cut_of[end] = candidate, cut
        best = found
        cuts.append(cut_of)
    bounds = [total]
    for cut_of in reversed(cuts):
        bounds.append(cut_of[bounds[-1]])
    return bounds[::-1]


def to_json(plan: TensorPlan, note: str) -> str:
    """One JSON object, with the fields of docs/ckpt_plan.md that are known without torch; `files` is null."""
    content = {
        "layout": plan.layout.as_dict(),
        "params_dtype": plan.config.model.params_dtype,
        "vocab_size": plan.vocab_sizes[0],
        "padded_vocab_size": plan.vocab_sizes[1],
        "files": None,
        "tensor_bytes": sum(plan.by_kind.values()),
        "bytes_by_kind": plan.by_kind,
        "per_rank": [
            {"rank": rank.rank, **rank.at._asdict(), "tensor_bytes": sum(rank.by_kind.values()),
             "bytes_by_kind": rank.by_kind}
            for rank in plan.ranks
        ],
        "notes": [note],
    }  # fmt: skip
    return json.dumps(content) + "\n"


def render(plan: TensorPlan, note: str) -> str:
    """Text for a terminal: totals, then one line per stage."""
    total = sum(plan.by_kind.values())
    lines = [
        f"{plan.layout}, {plan.config.model.params_dtype}, vocabulary {plan.vocab_sizes[0]} padded to "
        f"{plan.vocab_sizes[1]}",
        f"tensors {total} bytes ({size(total, 2)})",
        *(f"  {kind.replace('_', ' '):16} {num:>20}  {size(num, 2)}" for kind, num in plan.by_kind.items()),
        "",
    ]
    rows = []
    for rank in plan.ranks:
        if rank.at.tp == 0 and rank.at.dp == 0:
            rows.append((str(rank.at.pp), *(str(rank.by_kind[kind]) for kind in TENSOR_KINDS)))
    header = ("stage", *(kind.replace("_", " ") for kind in TENSOR_KINDS))
    lines += [*text_table(header, rows, indent="", left=0), "(bytes of each rank; weights of the first replica alone)"]
    return "\n".join([*lines, "", f"note: {note}"]) + "\n"
