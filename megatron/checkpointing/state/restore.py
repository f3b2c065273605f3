"""Restores the content of a checkpoint in the live DeepSpeed engine: weights, optimizer, random state, progress.

All arguments called `engine` are DeepSpeed PipelineEngines, or with --zero-stage 3 its engine of that.

Adam's state is converted for the Adam of this run: torch's, or apex's or DeepSpeed's FusedAdam. On CUDA upstream trains
with FusedAdam, whose parameter groups have other options than torch's: they say whether the bias of the moments is
corrected, they count the steps, and they do not name the rule of weight decay, which is always the decoupled one.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.checkpointing.engines.errors import CheckpointMismatchError
from megatron.checkpointing.state import zero3
from megatron.checkpointing.state.collect import Progress
from megatron.checkpointing.state.layer_files import layer_files
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.naming import RankPlace
from megatron.config import Config
from megatron.config.training import samples_of_run
from megatron.parallel.random import seed_everything, set_rng_state

logger = logging.getLogger(__name__)

# Settings of a parameter group that come from the command line. The schedule, if restored, sets the last two again.
_HYPER_PARAMETERS = ("betas", "eps", "momentum", "lr", "weight_decay")
_SCALE_PROGRESS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_OF_FUSED = "bias_correction"  # an option that the parameter groups of FusedAdam alone have


def restore_layers(
    engine: Any, place: RankPlace, states: Mapping[str, Any], files: Collection[str] | None = None
) -> None:
    """Put the weights of the layers that are in `files`, by default of all, into the live engine.

    Raises RuntimeError if a tensor is missing, or its shape does not fit.
    """
    for file in layer_files(engine.module, place):
        if files is None or file.name in files:
            file.restore(states[file.name])


def restore_state(
    engine: Any, place: RankPlace, states: Mapping[str, Any], config: Config, *, with_layers: bool = True
) -> Progress:
    """Put the loaded files of this rank into the live engine. Returns the progress that they record.

    `check_training` has accepted the mp_rank file. Without `with_layers` those are live already. Raises RuntimeError
    from torch if a tensor's shape does not fit.
    """
    options = config.checkpoint
    common = states[names.model_states_file(place.layout, place.at)]
    if with_layers:
        restore_layers(engine, place, states)
    with_optimizer = not (options.no_load_optim or options.finetune)
    shard = states.get(names.optimizer_file(place.layout, place.at, place.params_dtype))
    if shard is not None and place.layout.zero == 3:
        _restore_divided(engine, shard["optimizer_state_dict"], with_optimizer)
    elif with_optimizer and shard is not None:
        restore_optimizer(engine, place, shard["optimizer_state_dict"])
    else:
        engine.optimizer._restore_from_bit16_weights()
    progress = restore_progress(engine, common, config)
    if not (options.finetune or options.no_load_rng):
        _restore_rng(common, shard, place, config, progress)
    return progress


def restore_progress(engine: Any, common: Mapping[str, Any], config: Config) -> Progress:
    """Put schedule and counters of an mp_rank file, which `check_training` has accepted, into the live engine.

    Raises CheckpointMismatchError if the schedule is another, ValueError as `progress_of`.
    """
    options = config.checkpoint
    if options.finetune:
        return Progress()
    progress = Progress() if options.reset_iteration else progress_of(common)
    if not options.no_load_lr_state:
        try:
            engine.lr_scheduler.load_state_dict(common["lr_scheduler"])
        except ValueError as exc:
            raise CheckpointMismatchError(str(exc)) from exc
    if not options.reset_iteration:
        engine.global_steps = common["global_steps"]
        engine.global_samples = common["global_samples"]
        engine.skipped_steps = common["skipped_steps"]
    return progress


def _restore_divided(engine: Any, shard: Mapping[str, Any], with_moments: bool) -> None:
    """As restore_optimizer with --zero-stage 3, and weights; without `with_moments` only masters and weights."""
    shard = dict(shard)
    if with_moments:
        shard[zero3.BASE] = convert_adam_state(shard[zero3.BASE], engine.basic_optimizer.param_groups)
    with preserving_settings(engine.optimizer):
        zero3.restore(engine, shard, with_moments=with_moments)


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


def seed_anew(config: Config, place: RankPlace, progress: Progress) -> None:
    """Other random numbers than those that training began with, the same on every resume from here.

    The random state of a rank has no successor on another layout.
    """
    seed_everything(
        config.training.seed + progress.iteration,
        place.at,
        sequence_parallel_size=config.parallel.ds_sequence_parallel_size,
        replicas_differ=config.training.data_parallel_random_init,
    )


def _restore_rng(
    common: Mapping[str, Any], shard: Mapping[str, Any] | None, place: RankPlace, config: Config, progress: Progress
) -> None:
    """Restore the rank's random state from its shard or, if it has none (upstream), that of the first DP replica.

    Replicas have the same, and ranks of one sequence must not: where these were others it is seeded anew.
    Raises CheckpointMismatchError if the checkpoint was saved without any: dropout would repeat its first masks.
    """
    then = getattr(common["args"], "ds_sequence_parallel_size", 1)
    now = config.parallel.ds_sequence_parallel_size
    own = (shard or {}).get("rng_state")
    if own is None and "rng_state" not in common:
        raise CheckpointMismatchError(
            "the checkpoint holds no random state (it was saved with --no-save-rng): give --no-load-rng to go on with "
            "one seeded from --seed, or load another checkpoint"
        )
    if then != now or (own is None and now > 1):
        if config.parallel.rank == 0:
            logger.info(
                "--ds-sequence-parallel-size %d, saved with %s: random state is seeded anew from --seed", now, then
            )
        seed_anew(config, place, progress)
    else:
        set_rng_state(common["rng_state"][0] if own is None else own)


def convert_adam_state(base: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Convert `base`, the state_dict of an Adam, to the kind of Adam whose parameter groups are `own`.

    Both have the groups in the same order. No tensor of `base` is copied or changed: moments and steps are carried over
    bit for bit. A conversion is logged, since the other Adam rounds its steps differently.

    Raises CheckpointMismatchError if `base` was trained with L2 weight decay, since FusedAdam's is always decoupled.
    """
    if isinstance(base, list):  # zero_optimization.elastic_checkpoint
        return base
    groups: list[dict[str, Any]] = []
    state = dict(base["state"])
    for saved, here in zip(base["param_groups"], own, strict=True):
        if (_OF_FUSED in saved) == (_OF_FUSED in here):
            groups.append(saved)
            continue
        _check_weight_decay(saved, here)
        known = {key: value for key, value in saved.items() if key in here}
        groups.append(dict(here) | known)
        for param in saved["params"]:
            values = state.get(param)
            if values is None:  # before the first step
                continue
            step = values["step"] if "step" in values else saved.get("step", 0)
            if _OF_FUSED in here:
                groups[-1]["step"] = int(step)
            else:
                state[param] = {**values, "step": torch.tensor(float(step))}
    if any(mine is not theirs for mine, theirs in zip(groups, base["param_groups"], strict=True)):
        kinds = ("FusedAdam (apex's or DeepSpeed's)", "torch's Adam")
        saved_by, here_is = kinds if _OF_FUSED not in own[0] else kinds[::-1]
        logger.info(
            "the checkpoint's optimizer is %s and this run's %s: moments and steps are carried over bit for bit, but "
            "further steps may round differently",
            saved_by,
            here_is,
        )
    return {**base, "state": state, "param_groups": groups}


def _check_weight_decay(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    if _OF_FUSED in here and saved.get("decoupled_weight_decay") is False and saved.get("weight_decay"):
        raise CheckpointMismatchError(
            "the checkpoint was trained by torch's Adam with L2 weight decay (upstream on CPU), but this run's "
            "FusedAdam has decoupled weight decay: the training would change; resume without apex, or with "
            "--no-load-optim"
        )


def start_over(engine: Any, seed: int) -> None:
    """Initialize the parameters of a model that was built without values, and the optimizer's masters.

    Collective with --zero-stage 3.
    """
    if zero3.divides_weights(engine):
        zero3.initialize(engine, seed)
        return
    engine.module.initialize_parameters(seed)
    engine.optimizer._restore_from_bit16_weights()
