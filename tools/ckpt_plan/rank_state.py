"""What a rank would save: the same FileStates as megatron.checkpointing.state.collect.collect_state, with meta tensors.

collect_state itself and DeepSpeed's own methods make them. In place of DeepSpeed's engine there are a model on the meta
device (stage.py) and a ZeRO-1 shard laid out by arithmetic (shard.py). This needs no process group, no device, and no
more memory than the names and shapes take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.checkpointing.engines.base import FileState
from megatron.checkpointing.state.collect import Progress, collect_state
from megatron.checkpointing.store.naming import RankPlace
from megatron.config import Config
from megatron.config.deepspeed_config import build_deepspeed_config
from megatron.optimizer.param_scheduler import OptimizerParamScheduler
from megatron.parallel.accelerator import accelerator
from megatron.parallel.random import get_rng_state, seed_everything, set_rng_state
from megatron.parallel.topology import Coordinates, Layout

from .shard import build_shard
from .stage import StageOnMeta, stage_on_meta

_CUDA_RNG_BYTES = 16  # seed and offset, 8 bytes each (ATen/cuda/CUDAGeneratorImpl.cpp, get_state)


def planned_files(
    config: Config,
    layout: Layout,
    coordinates: Coordinates,
    vocab_sizes: tuple[int, int],
    progress: Progress | None = None,
    *,
    with_placements: bool = False,
) -> list[FileState]:
    """The files of the rank at `coordinates` with the state that they will hold; weights, master weights and moments
    are meta tensors.

    `vocab_sizes`: the tokenizer's, and the size padded for TP. `progress`: at the save; None: at the first save of the
    run. `with_placements`: as collect_state. Raises ConfigError for a model that does not fit the layout.
    """
    progress = progress or first_save(config)
    rank = layout.rank(*coordinates)
    parallel = dataclasses.replace(config.parallel, rank=rank, world_size=layout.world_size)
    config = dataclasses.replace(config, parallel=parallel)
    # The ranks of a TP group have the same shapes, and only placements say which part each of them holds.
    at = coordinates if with_placements else coordinates._replace(tp=0)
    stage = stage_on_meta(config.model, vocab_sizes[1], layout, at)
    engine = _Engine(config, layout, coordinates, stage, progress)
    place = RankPlace(layout, coordinates, config.model.params_dtype)
    with _random_state_of(config, coordinates):
        files = collect_state(engine, place, config, vocab_sizes, progress, with_placements)
    _as_on_device(files, planned_device(config))
    return files


def first_save(config: Config) -> Progress:
    """Progress at the first save of a run that starts from iteration 0."""
    iterations = config.training.train_iters
    return progress_at(config, min(config.checkpoint.save_interval or iterations, iterations))


def progress_at(config: Config, iteration: int) -> Progress:
    """Progress at the end of `iteration` of a run that starts from iteration 0."""
    training = config.training
    evaluations = iteration // training.eval_interval if training.eval_interval else 0
    return Progress(
        iteration=iteration,
        consumed_train_samples=training.batch_sizes.consumed(iteration),
        consumed_valid_samples=evaluations * training.eval_iters * training.global_batch_size,
        indexed_samples=training.needed_samples,
    )


def planned_device(config: Config) -> str:
    """ "cpu" or "cuda": the device type that the trainer of this configuration would choose."""
    backend = config.parallel.distributed_backend
    if backend is None:
        return accelerator().device_name()
    return "cuda" if backend == "nccl" else "cpu"


class _Grid:
    """Sizes of the layout, under the names of DeepSpeed's PipelineParallelGrid."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def get_pipe_parallel_world_size(self) -> int:
        return self._layout.pp

    def get_slice_parallel_world_size(self) -> int:
        return self._layout.tp


class _Engine:
    """Stands in for the PipelineEngine of one rank, with what a save uses of it."""

    _common_checkpoint_state = DeepSpeedEngine._common_checkpoint_state
    _get_buffer_names = DeepSpeedEngine._get_buffer_names
    _get_zero_param_shapes = DeepSpeedEngine._get_zero_param_shapes

    def __init__(self, config: Config, layout: Layout, at: Coordinates, stage: StageOnMeta, progress: Progress) -> None:
        self.module = stage
        self.config = build_deepspeed_config(config)
        self.optimizer = build_shard(self.module, config, layout, at, self.config, progress.iteration)
        self.param_names = self.optimizer.param_names
        self.lr_scheduler = OptimizerParamScheduler(
            self.optimizer.optimizer, config.optimizer, config.training, config.model.seq_length
        )
        self.lr_scheduler.step(progress.consumed_train_samples)
        self.mpu = _Grid(layout)
        self.global_steps = progress.iteration
        self.global_samples = progress.consumed_train_samples
        self.skipped_steps = 0
        self.seq_dp_world_size = layout.dp
        self.mp_world_size = layout.tp * layout.pp
        self.training_dataloader = None
        self._bf16 = config.model.bf16

    def bfloat16_enabled(self) -> bool:
        return self._bf16

    def random_ltd_enabled(self) -> bool:
        return False

    def _get_shared_params(self) -> dict[str, str]:
        """Tied weights are one parameter of a stage; DeepSpeed's method compares addresses, which meta tensors lack."""
        return {}


@contextmanager
def _random_state_of(config: Config, at: Coordinates) -> Iterator[None]:
    """Within the context, this process has the random state with which the rank at `at` starts."""
    before = get_rng_state()
    try:
        seed_everything(
            config.training.seed,
            at,
            sequence_parallel_size=config.parallel.ds_sequence_parallel_size,
            replicas_differ=config.training.data_parallel_random_init,
        )
        yield
    finally:
        set_rng_state(before)


def _as_on_device(files: list[FileState], device: str) -> None:
    """Give the random states of `files` the form that they have on `device`, if this process uses another device."""
    if accelerator().device_name() == device:
        return
    form = torch.zeros(_CUDA_RNG_BYTES, dtype=torch.uint8) if device == "cuda" else torch.get_rng_state()
    for file in files:
        found = file.state.get("rng_state")
        for states in [found] if isinstance(found, dict) else found or []:
            states["cuda_rng_state"] = form.clone()
            states["rng_tracker_states"] = {name: form.clone() for name in states["rng_tracker_states"]}
