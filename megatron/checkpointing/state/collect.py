"""Collects the content of a checkpoint from the live DeepSpeed engine: one state per file.

The content is that of DeepSpeed's own save_checkpoint (a test compares the two), collected here without its collectives
and without writing anything, so that engines are free in how they write. All arguments called `engine` are DeepSpeed
PipelineEngines, or with --zero-stage 3 its engine of that.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from deepspeed import __version__ as deepspeed_version

from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.state import zero3
from megatron.checkpointing.state.changed_flags import input_contents
from megatron.checkpointing.state.layer_files import layer_files
from megatron.checkpointing.state.shard_metadata import add_placements
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.naming import RankPlace
from megatron.config import Config, ModelConfig
from megatron.config.arguments import namespace_from_config
from megatron.parallel.random import get_rng_state

logger = logging.getLogger(__name__)

_MASTERS = "single_partition_of_fp32_groups"  # key of the master weights in DeepSpeed's shards


@dataclass
class Progress:
    """The progress of training: what a resume needs besides tensors and random state."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    # (train, valid, test) samples that the index was built for. They stay the same over resumes, and so the data order.
    indexed_samples: tuple[int, int, int] | None = None


def live_state(
    engine: Any, place: RankPlace, with_optimizer: bool, with_tensors: bool, layers: Collection[str] | None = None
) -> list[FileState]:
    """The files that this rank loads; `with_tensors`: with the live weights and masters, which loads may fill in place.

    `layers`: the files of layers among them; None: those of all layers of its stage.

    An engine may fill them before all ranks know whether the checkpoint is undamaged: whatever is applied afterwards,
    from that checkpoint or another, replaces them all, and so does `start_over`. Before the first step there are no
    moments.
    """
    mine = [
        FileState(file.name, file.state if with_tensors else {})
        for file in layer_files(engine.module, place)
        if layers is None or file.name in layers
    ]
    mine.append(FileState(names.model_states_file(place.layout, place.at), {}))
    divided = place.layout.zero == 3
    if with_optimizer or divided:
        shard: dict[str, Any] = {}
        if with_tensors and divided:
            shard = {"optimizer_state_dict": {zero3.MASTERS: zero3.live_masters(engine)}}
        elif with_tensors:
            masters = engine.optimizer.state_dict()[_MASTERS]
            shard = {"optimizer_state_dict": {_MASTERS: [master.detach() for master in masters]}}
        mine.append(FileState(names.optimizer_file(place.layout, place.at, place.params_dtype), shard))
    return mine


def collect_state(
    engine: Any,
    place: RankPlace,
    config: Config,
    vocab_sizes: tuple[int, int],
    progress: Progress,
    with_placements: bool = False,
    every_replica: bool = False,
) -> list[FileState]:
    """The files of this rank with the live state that they are to hold; tensors are not copied.

    `vocab_sizes`: the tokenizer's, and the size padded for TP. `with_placements`: add to every tensor which part of
    which parameter it is (megatron.checkpointing.state.shard_metadata).
    The first DP replica writes weights and shared state; of experts that only some DP ranks hold, the first of these
    does. Every rank writes its ZeRO-1 shard, which includes the random state of the rank. `every_replica`: the other
    replicas also get weights and shared state, for saves in memory only. With --zero-stage 3 every rank writes its part
    of the weights, with the shared state beside it, and tensors have no placements.
    """
    files: list[FileState] = []
    rng = get_rng_state()
    divided = place.layout.zero == 3
    first = place.at.dp == 0 or divided
    for weights in layer_files(engine.module, place):
        writes = weights.replicas[0] == place.at.dp
        if writes or every_replica:
            files.append(FileState(weights.name, weights.state, on_storage=writes))
    if first or every_replica:
        client = client_state(config, vocab_sizes, progress)
        if not config.checkpoint.no_save_rng:
            client["rng_state"] = [rng]
        common = engine._common_checkpoint_state(zero3.placeholders(engine) if divided else None, True, divided)
        name = names.model_states_file(place.layout, place.at)
        files.append(FileState(name, common | client, on_storage=first))
    if not config.checkpoint.no_save_optim:
        shard: dict[str, Any] = {
            "optimizer_state_dict": engine.optimizer.state_dict(),
            "ds_config": engine.config,
            "ds_version": deepspeed_version,
        }
        if not config.checkpoint.no_save_rng:
            shard["rng_state"] = rng
        files.append(FileState(names.optimizer_file(place.layout, place.at, place.params_dtype), shard))
    return add_placements(engine, place, vocab_sizes[0], files) if with_placements and not divided else files


def client_state(config: Config, vocab_sizes: tuple[int, int], progress: Progress) -> dict[str, Any]:
    """The state that upstream saves in addition to DeepSpeed's, under upstream's names."""
    args = namespace_from_config(config)
    args.padded_vocab_size = vocab_sizes[1]
    args.iteration = progress.iteration
    args.consumed_train_samples = progress.consumed_train_samples
    args.consumed_valid_samples = progress.consumed_valid_samples
    args.consumed_train_tokens = progress.consumed_train_samples * config.model.seq_length
    args.indexed_samples = progress.indexed_samples
    args.input_contents = input_contents(config.data)
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": progress.iteration,
        "tokens": args.consumed_train_tokens,
        "universal_checkpoint_info": universal_checkpoint_info(
            config.model, config.parallel.tensor_model_parallel_size, *vocab_sizes
        ),
    }


def universal_checkpoint_info(model: ModelConfig, tp: int, vocab_size: int, padded_vocab_size: int) -> dict[str, Any]:
    """Patterns that tell DeepSpeed's universal checkpoint how each parameter is split over `tp` ranks.

    Format 0.4 of deepspeed/checkpoint (constants.py, ds_to_universal.py). Upstream's own patterns split fused QKV as
    one matrix, and leave out row parallelism if TP is 1, so that a larger TP splits along the wrong dimension.
    """
    tied = not model.untie_embeddings_and_output_weights
    vocabulary = (
        ["tied_modules.embed.word_embeddings.weight"]
        if tied
        else [r"\d+.word_embeddings.weight", r"\d+.lm_head.weight"]
    )
    norm_parts = ["weight", "bias"] if model.normalization == "layernorm" else ["weight"]
    replicated = [
        rf"\d+.{prefix}{part}"
        for part in norm_parts
        for prefix in ("input_layernorm.", "post_attention_layernorm.", "")
    ]
    mlp = _mlp_pattern(model)
    if model.add_bias_linear:
        replicated += [r"\d+.self_attention.dense.bias", rf"{mlp}.dense_4h_to_h.bias"]
    if model.has_experts:
        replicated += [r"\d+.mlp.deepspeed_moe.gate.wg.weight"]
        replicated += [rf"\d+.mlp.coefficient.{part}" for part in ("weight", "bias") if model.has_residual_mlp]
    if model.add_position_embedding:
        replicated.append(r"(tied_modules.embed|\d+).position_embeddings.weight")
    if model.embed_layernorm:
        replicated += [rf"(tied_modules.embed|\d+).word_embeddings.norm.{part}" for part in ("weight", "bias")]
    linear_parts = ["weight", "bias"] if model.add_bias_linear else ["weight"]
    query, kv = (model.kv_channels * heads for heads in (model.num_attention_heads, model.num_key_value_heads))
    fused = {rf"\d+.self_attention.query_key_value.{part}": (query, kv, kv) for part in linear_parts}
    return {
        "universal_checkpoint_version": 0.4,
        "original_vocab_size": vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "vocabulary_parameter_patterns": vocabulary,
        "pipeline_replicated_parameter_patterns": vocabulary if tied else [],
        "tp_replicated_parameter_patterns": replicated,
        "parameter_with_row_parallelism_patterns": [rf"{mlp}.dense_4h_to_h.weight", r"\d+.self_attention.dense.weight"],
        "parameter_with_2_sub_params_cat_dim_0": [rf"{mlp}.dense_h_to_4h.{part}" for part in linear_parts]
        if model.swiglu
        else [],
        "parameter_with_sub_params": [
            {
                "patterns": [pattern],
                "shape": (sizes, model.hidden_size) if pattern.endswith("weight") else (sizes,),
                "partition_dim": 0,
            }
            for pattern, sizes in fused.items()
        ],
        "sub_param_shard_widths": {pattern: [[size // tp] * tp for size in sizes] for pattern, sizes in fused.items()},
    }


def _mlp_pattern(model: ModelConfig) -> str:
    """Of the names of all MLPs: those of blocks, of experts, and those that experts have beside them."""
    if not model.has_experts:
        return r"\d+.mlp"
    return r"\d+.mlp(\.deepspeed_moe\.experts\.deepspeed_experts\.\d+|\.mlp)?"
