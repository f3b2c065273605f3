"""The DeepSpeed engine around model, optimizer and schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron.config import Config
from megatron.config.deepspeed_config import build_deepspeed_config
from megatron.optimizer.build import build_optimizer
from megatron.optimizer.param_scheduler import OptimizerParamScheduler
from megatron.startup.compilation import graphs_compiled
from megatron.startup.initialize import Runtime
from restart_trace.mounts import storage_fields

logger = logging.getLogger(__name__)


def build_engine(config: Config, model: Any, batch_fn: Callable[[Any], Any]) -> Any:
    """Build optimizer and schedule and let DeepSpeed wrap them; collective.

    Returns a PipelineEngine, or with --zero-stage 3 a Zero3Engine.
    """
    optimizer = build_optimizer(model, config.optimizer)
    scheduler = OptimizerParamScheduler(optimizer, config.optimizer, config.training, config.model.seq_length)
    engine = _wrapped(config, model, optimizer, scheduler)
    scheduler.optimizer = engine.optimizer
    _count_experts_once(engine)
    engine.set_batch_fn(batch_fn)
    set_batch_size(engine, config.training.global_batch_size, config.parallel.ds_sequence_parallel_size)
    _start_backward_timers_once(engine)
    if config.parallel.deepspeed_activation_checkpointing:
        _configure_activation_checkpointing(config, engine)
    return engine


def _wrapped(config: Config, model: Any, optimizer: Any, scheduler: Any) -> Any:
    """DeepSpeed's engine around these."""
    settings = build_deepspeed_config(config)
    if config.parallel.zero_stage == 3:
        from megatron.startup.zero3_engine import Zero3Engine

        return Zero3Engine(model, optimizer, scheduler, settings)
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings, dist_init_required=False
    )
    return engine


def set_batch_size(engine: Any, samples: int, sequence_parallel_size: int) -> None:
    """Set the size of the next batches: `samples` over all ranks, which DeepSpeed counts and prints from then on.

    DeepSpeed takes the ranks of a sequence for data-parallel ranks, each with samples of its own, where it derives the
    number of micro-batches.
    """
    engine.set_train_batch_size(samples * sequence_parallel_size)
    engine._config.train_batch_size = engine.batch_timer.batch_size = samples


def _count_experts_once(engine: Any) -> None:
    """Let the gradient norm in bf16 count each divided expert once, and its parts over TP.

    DeepSpeed 0.19.8's BF16_Optimizer counts what TP ranks hold alike (the bias of the second matrix) on each of them,
    and its sum over stages waits for those that hold no experts. Here the squares are added up within the group over
    which experts are divided, and join those of the other parameters. Its optimizer for fp16 and fp32 sums over all
    data-parallel ranks anyway, of which each holds another part.
    """
    optimizer = engine.optimizer
    if not (hasattr(optimizer, "bf16_groups") and optimizer.has_moe_layers):
        return
    of_deepspeed, by_name = optimizer.get_grads_for_norm, engine.module.expert_parallel.by_name

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        if for_clipping:
            return of_deepspeed(for_clipping=True)
        shared, _ = of_deepspeed()
        for group, params, grads in zip(
            optimizer.param_groups, optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True
        ):
            if group.get("moe"):
                mine = [
                    grad for param, grad in zip(params, grads, strict=True)
                    if param.tensor_model_parallel or engine.module.tp.rank == 0
                ]  # fmt: skip
                shared.append(by_name(group["name"]).norm(mine, engine.device))
        return shared, {}

    optimizer.get_grads_for_norm = get_grads_for_norm


def _start_backward_timers_once(engine: Any) -> None:
    """Let wall_clock_breakdown and flops_profiler run with pipeline stages.

    DeepSpeed 0.19.8's PipelineEngine starts the timers of the backward pass itself, and on every stage but the last the
    hooks of its DeepSpeedEngine start them once more, which fails an assertion.
    """
    if not engine.is_last_stage():
        engine.engine_timers.backward_timers = []
        engine.engine_timers.backward_inner_timers = []


def report_flops(engine: Any) -> None:
    """Print the profile of flops_profiler, if the iteration just done is its profile_step.

    DeepSpeed does so in DeepSpeedEngine.step, which its PipelineEngine does not call. The profile is that of rank 0's
    last micro-batch and its stage.
    """
    step = engine.global_steps - 1
    if not engine.flops_profiler_enabled() or step != engine.flops_profiler_profile_step() or engine.global_rank:
        return
    profiler = engine.flops_profiler
    if not profiler.started:  # a profile_step that was skipped over by a resume
        return
    # Its timers hold all micro-batches of the iteration, or nothing; the profile has the time of its own micro-batch.
    engine.wall_clock_breakdown = lambda: False
    try:
        profiler.print_model_profile(
            profile_step=step,
            module_depth=engine.flops_profiler_module_depth(),
            top_modules=engine.flops_profiler_top_modules(),
            detailed=engine.flops_profiler_detailed(),
            output_file=engine.flops_profiler_output_file(),
        )
    finally:
        del engine.wall_clock_breakdown
    profiler.end_profile()


def _configure_activation_checkpointing(config: Config, engine: Any) -> None:
    import deepspeed

    parallel = config.parallel
    grid = engine.grid
    # One method of the grid makes DeepSpeed treat it as a newer mpu, and call this method, which the grid lacks.
    grid.get_tensor_model_parallel_group = grid.get_slice_parallel_group
    deepspeed.checkpointing.configure(
        mpu_=grid,
        partition_activations=parallel.partition_activations,
        contiguous_checkpointing=parallel.contigious_checkpointing,
        num_checkpoints=config.model.num_layers,
        checkpoint_in_cpu=parallel.checkpoint_in_cpu,
        synchronize=parallel.synchronize_each_layer,
        profile=parallel.profile_backward,
    )


def elements_of(model: Any) -> int:
    """Of all parameters; with --zero-stage 3 of the whole model, of which a rank has a part."""
    return sum(getattr(param, "ds_numel", param.numel()) for param in model.parameters())


def runtime_facts(engine: Any, runtime: Runtime, config: Config) -> dict[str, Any]:
    """The optimizer, device and backend that run, for the trace."""
    inner = engine.basic_optimizer
    return {
        "optimizer": f"{type(inner).__module__}.{type(inner).__qualname__}",
        "accelerator": runtime.device.type,
        "backend": runtime.backend,
        **(graphs_compiled() if config.training.torch_compile else {}),
        "parameters": elements_of(engine.module),
        **storage_fields("save", config.checkpoint.save),
        **storage_fields("load", config.checkpoint.load),
    }
