"""The content of a checkpoint: collects one state per file from the live DeepSpeed engine, and restores it.

The content is that of DeepSpeed's own save_checkpoint (a test compares the two), collected here without its collectives
and without writing anything, so that engines are free in how they write. All arguments called `engine` are DeepSpeed
PipelineEngines.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed import __version__ as deepspeed_version

from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.engines.errors import CheckpointMismatchError
from megatron.checkpointing.state.adam import convert_adam_state
from megatron.checkpointing.state.changed_flags import changes, check_optimizer, check_schedule_is_there
from megatron.checkpointing.state.input_files import input_contents
from megatron.checkpointing.state.shard_metadata import add_placements, layer_modules
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.naming import RankPlace
from megatron.config import Config, ModelConfig
from megatron.config.arguments import namespace_from_config
from megatron.config.training import samples_of_run
from megatron.parallel.random import get_rng_state, set_rng_state

logger = logging.getLogger(__name__)

_MASTERS = "single_partition_of_fp32_groups"  # key of the master weights in DeepSpeed's shards
# Settings of a parameter group that come from the command line. The schedule, if restored, sets the last two again.
_HYPER_PARAMETERS = ("betas", "eps", "momentum", "lr", "weight_decay")
_SCALE_PROGRESS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass
class Progress:
    """The progress of training: what a resume needs besides tensors and random state."""

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    # (train, valid, test) samples that the index was built for. They stay the same over resumes, and so the data order.
    indexed_samples: tuple[int, int, int] | None = None


def live_state(engine: Any, place: RankPlace, with_optimizer: bool, with_tensors: bool) -> list[FileState]:
    """The files that this rank loads; `with_tensors`: with the live weights and masters, which loads may fill in place.

    An engine may fill them before all ranks know whether the checkpoint is undamaged: whatever is applied afterwards,
    from that checkpoint or another, replaces them all, and so does `start_over`. Before the first step there are no
    moments.
    """
    mine = [
        FileState(names.layer_file(number, place.at.tp), layer.state_dict() if with_tensors else {})
        for number, layer in layer_modules(engine)
    ]
    mine.append(FileState(names.model_states_file(place.layout, place.at), {}))
    if with_optimizer:
        shard: dict[str, Any] = {}
        if with_tensors:
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
    The first DP replica writes weights and shared state; every rank writes its ZeRO-1 shard, which includes the random
    state of the rank. `every_replica`: the other replicas also get weights and shared state, for saves in memory only.
    """
    files: list[FileState] = []
    rng = get_rng_state()
    first = place.at.dp == 0
    if first or every_replica:
        for number, layer in layer_modules(engine):
            name = names.layer_file(number, place.at.tp)
            files.append(FileState(name, layer.state_dict(), on_storage=first))
        client = client_state(config, vocab_sizes, progress)
        if not config.checkpoint.no_save_rng:
            client["rng_state"] = [rng]
        common = engine._common_checkpoint_state(None, True, False)
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
    return add_placements(engine, place, vocab_sizes[0], files) if with_placements else files


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
    if model.add_bias_linear:
        replicated += [r"\d+.self_attention.dense.bias", r"\d+.mlp.dense_4h_to_h.bias"]
    if model.add_position_embedding:
        replicated.append(r"(tied_modules.embed|\d+).position_embeddings.weight")
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
        "parameter_with_row_parallelism_patterns": [
            r"\d+.mlp.dense_4h_to_h.weight",
            r"\d+.self_attention.dense.weight",
        ],
        "parameter_with_2_sub_params_cat_dim_0": [rf"\d+.mlp.dense_h_to_4h.{part}" for part in linear_parts]
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


def restore_state(
    engine: Any, place: RankPlace, states: Mapping[str, Any], config: Config, directory: Path
) -> Progress:
    """Put the loaded files of this rank into the live engine. Returns the progress that they record.

    `directory`: of the checkpoint. Raises CheckpointMismatchError if another optimizer saved it, and RuntimeError from
    torch if a tensor's shape does not fit.
    """
    options = config.checkpoint
    common = states[names.model_states_file(place.layout, place.at)]
    check_optimizer(common["args"], namespace_from_config(config), directory)
    for number, layer in layer_modules(engine):
        layer.load_state_dict(states[names.layer_file(number, place.at.tp)], strict=True)
    with_optimizer = not (options.no_load_optim or options.finetune)
    shard = states.get(names.optimizer_file(place.layout, place.at, place.params_dtype))
    if with_optimizer and shard is not None:
        restore_optimizer(engine, place, shard["optimizer_state_dict"])
    else:
        engine.optimizer._restore_from_bit16_weights()
    if not (options.finetune or options.no_load_rng):
        _restore_rng(common, shard)
    return restore_progress(engine, common, config)


def restore_progress(engine: Any, common: Mapping[str, Any], config: Config) -> Progress:
    """Put the progress that an mp_rank file records into the live engine.

    Rank 0 logs each flag that differs from the run that saved.
    """
    options = config.checkpoint
    if config.parallel.rank == 0:
        mine = namespace_from_config(config)
        mine.input_contents = input_contents(config.data)
        for line in changes(common["args"], mine):
            logger.warning("changed on resume: %s", line)
    if options.finetune:
        return Progress()
    check_schedule_is_there(common, options)
    if not options.no_load_lr_state:
        _restore_schedule(engine, common["lr_scheduler"])
    if options.reset_iteration:
        return Progress()
    engine.global_steps = common["global_steps"]
    engine.global_samples = common["global_samples"]
    engine.skipped_steps = common["skipped_steps"]
    return progress_of(common)


def restore_tied_weights(engine: Any, with_optimizer: bool) -> None:
    """Fill the copies of tied weights on later stages, which no layer file holds; collective over all stages.

    With the optimizer each stage makes them from its masters, as in a step; those of two stages differ by rounding,
    since each sums gradients in its own order. Without the optimizer the first stage's weights are broadcast, and the
    masters get their values.
    """
    if not engine.module.tied_comms:
        return
    if with_optimizer:
        if engine.module.stage_id > 0:
            engine.optimizer.update_lp_params()
        return
    engine.module._synchronize_tied_weights()
    engine.optimizer._restore_from_bit16_weights()


def progress_of(common: Mapping[str, Any]) -> Progress:
    """Progress recorded in an mp_rank file, ours or upstream's. Raises ValueError if a count is not a valid number."""
    args = common["args"]
    indexed = getattr(args, "indexed_samples", None)
    if indexed is None:  # upstream builds the index for all iterations of the run
        indexed = samples_of_run(
            args.train_iters,
            args.eval_interval,
            args.eval_iters,
            args.global_batch_size,
            getattr(args, "train_samples", None),
        )
    train, valid, test = indexed
    consumed = args.consumed_train_samples, args.consumed_valid_samples
    counts = common["iteration"], *consumed, train, valid, test
    if any(not isinstance(count, int) or count < 0 for count in counts):
        raise ValueError(f"progress {ascii(counts)[:200]}")
    return Progress(common["iteration"], *consumed, (train, valid, test))


def _restore_schedule(engine: Any, state: dict[str, Any]) -> None:
    try:
        engine.lr_scheduler.load_state_dict(state)
    except ValueError as exc:
        raise CheckpointMismatchError(str(exc)) from exc


def restore_optimizer(engine: Any, place: RankPlace, shard: dict[str, Any]) -> None:
    """Load this rank's `optimizer_state_dict` into DeepSpeed's optimizer."""
    base = convert_adam_state(shard["base_optimizer_state"], engine.basic_optimizer.param_groups)
    shards: list[Any] = [None] * place.layout.dp
    shards[place.at.dp] = shard | {"base_optimizer_state": base}
    with (
        preserving_settings(engine.optimizer),
        contextlib.redirect_stdout(io.StringIO()),  # DeepSpeed prints a debugging line here
    ):
        engine.optimizer.load_state_dict(
            state_dict_list=shards, load_optimizer_states=True, load_from_fp32_weights=True
        )


@contextlib.contextmanager
def preserving_settings(optimizer: Any) -> Iterator[None]:
    """Restore the settings of DeepSpeed's `optimizer`, which come from flags, after the body has loaded others.

    A dynamic loss scale continues from its loaded value. Whether weight decay is decoupled stays as in the checkpoint
    (megatron.optimizer.build). The settings are also restored if the load fails, since the next checkpoint is then
    tried.
    """
    clip_grad = optimizer.clip_grad
    scaler = getattr(optimizer, "loss_scaler", None)  # with --bf16 there is none
    kept = [{key: group[key] for key in _HYPER_PARAMETERS if key in group} for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, mine in zip(optimizer.param_groups, kept, strict=True):
            group.update(mine)
        optimizer.clip_grad = clip_grad
        if scaler is not None:
            loaded, optimizer.loss_scaler = optimizer.loss_scaler, scaler
            optimizer.dynamic_loss_scale = scaler.dynamic
            if scaler.dynamic and loaded.dynamic:
                for name in _SCALE_PROGRESS:
                    setattr(scaler, name, getattr(loaded, name))
                scaler.cur_scale = max(scaler.cur_scale, scaler.min_scale)
                scaler.cur_hysteresis = min(scaler.cur_hysteresis, scaler.delayed_shift)


def _restore_rng(common: Mapping[str, Any], shard: Mapping[str, Any] | None) -> None:
    """Restore the rank's random state from its shard or, if it has none (upstream), that of the first DP replica.

    Raises CheckpointMismatchError if the checkpoint was saved without any: dropout would repeat its first masks.
    """
    if shard is not None and "rng_state" in shard:
        set_rng_state(shard["rng_state"])
    elif "rng_state" in common:
        set_rng_state(common["rng_state"][0])
    else:
        raise CheckpointMismatchError(
            "the checkpoint holds no random state (it was saved with --no-save-rng): give --no-load-rng to go on with "
            "one seeded from --seed, or load another checkpoint"
        )


def start_over(engine: Any, seed: int) -> None:
    """Initialize the parameters of a model that was built without values, and the optimizer's masters."""
    engine.module.initialize_parameters(seed)
    engine.optimizer._restore_from_bit16_weights()
