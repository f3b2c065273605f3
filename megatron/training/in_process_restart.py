"""In-process restarts in the trainer: which runs can have them, what a process keeps then, what it undoes.

A process that returns keeps its model, DeepSpeed's engine and all process groups (megatron.parallel.reconnecting), and
takes the engine back to what it was when it was built (megatron.training.as_built). One that was still building its
engine keeps none of these, and builds it again, as a rank that is forked does. Either keeps a checkpoint engine whose
own process is at rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import TYPE_CHECKING, Any

from megatron.checkpointing.engines.registry import create_engine, why_not_returning
from megatron.config import CheckpointConfig, Config, ConfigError
from megatron.processes.in_process_restart import at_return, check_not_asked, is_possible

if TYPE_CHECKING:
    from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions
    from megatron.checkpointing.manager import Checkpointer
    from megatron.startup.initialize import Runtime
    from megatron.training.as_built import AsBuilt


def refusal(options: CheckpointConfig, *, compiles: bool, zero_stage: int = 1) -> str | None:
    """Why a run with these flags cannot have in-process restarts; None if it can. `compiles`: --torch-compile."""
    engine = options.checkpoint_engine
    if (options.save or options.load) is not None and (why := why_not_returning(engine)):
        return (
            f"--checkpoint-engine {engine} with --in-process-restart: {why}; use another engine, such as lazy, or "
            "leave out --in-process-restart"
        )
    untried = {
        f"--export-hf-interval {options.export_hf_interval}": options.export_hf_interval is not None,
        "--torch-compile": compiles,
        f"--zero-stage {zero_stage}": zero_stage == 3,
    }
    for given, refused in untried.items():
        if refused:
            return f"{given} with --in-process-restart: not tried together; leave out --in-process-restart"
    return None


@dataclasses.dataclass
class Kept:
    """What a process keeps when it returns. `groups`: those of Communicators."""

    engine: Any
    config: Config
    groups: list[tuple[str, Any]]
    as_built: AsBuilt


_kept: list[Kept] = []  # of this process, once it has built its engine
_checkpoint_engines: list[CheckpointEngine] = []  # of this process: the one, if any, that can serve its next start


def prepare_to_return(config: Config) -> None:
    """In a rank that returns after the failure of another one: have the state of this start undone then.

    Raises ConfigError for flags that refuse it.
    """
    if not is_possible():
        return
    why = refusal(config.checkpoint, compiles=config.training.torch_compile, zero_stage=config.parallel.zero_stage)
    if why is not None:
        raise ConfigError(why)
    if _kept and not _builds_the_same(_kept[0].config, config):  # what DeepSpeed's file says can have changed
        drop_world()
    at_return(leave_world)


def _builds_the_same(before: Config, now: Config) -> bool:
    return dataclasses.replace(before, checkpoint=now.checkpoint) == now


def kept_engine(runtime: Runtime) -> Any:
    """DeepSpeed's engine of the start before, which is as if it was just built; None if this process has none."""
    if not _kept:
        return None
    runtime.communicators.groups.extend(_kept[0].groups)
    return _kept[0].engine


def keep_engine(engine: Any, config: Config, runtime: Runtime) -> None:
    """`engine` is built: keep it and the groups when this process returns."""
    from megatron.training.as_built import AsBuilt

    if not _kept:
        leave_between_layers(engine.module)
        _kept.append(Kept(engine, config, list(runtime.communicators.groups), AsBuilt(engine)))
        gc.freeze()  # it stays: no later collection looks through it again


def checkpoint_engine(name: str, options: EngineOptions) -> CheckpointEngine:
    """The one that the start before has left, if it is the same, or a new one; raises as create_engine."""
    for engine in _checkpoint_engines:
        if (engine.name, engine.options) == (name, options):
            return engine
    while _checkpoint_engines:
        _checkpoint_engines.pop().close()
    return create_engine(name, options)


def leave_checkpoints(checkpointer: Checkpointer) -> None:
    """After an error: close it, but for an engine that can serve the next start of this process, if there is one."""
    if is_possible():
        _checkpoint_engines[:] = [checkpointer.context.checkpoint_engine] if checkpointer.leave() else []
    else:
        checkpointer.close(after_error=True)


def leave_between_layers(model: Any) -> None:
    """Have a step end before its next layer, forward or backward, once this rank is asked to return.

    Otherwise it would go on to its next collective: with data parallelism alone to the end of its last backward.
    """
    import torch

    def forward(*_: Any) -> None:
        check_not_asked()

    def backward(_layer: Any, _inputs: Any, output: Any) -> None:
        for one in output if isinstance(output, tuple) else (output,):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(forward)

    for layer in model.forward_funcs:
        if isinstance(layer, torch.nn.Module):
            layer.register_forward_pre_hook(forward)
            layer.register_forward_hook(backward)


def leave_world() -> None:
    """End all connections. Take the engine back to what it was when it was built, if it was built to its end."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    from megatron.parallel.reconnecting import disconnect_groups
    from megatron.parallel.tree import close_trees

    if not _kept:
        drop_world()
        return
    close_trees()
    disconnect_groups()
    profiler = getattr(_kept[0].engine, "flops_profiler", None)  # of DeepSpeed's file
    if profiler is not None:
        profiler.stop_profile()  # half a step may have left torch's functions replaced
    _kept[0].as_built.restore()
    checkpointing.reset()  # its buffers may hold the layers of half a step, and would have no place for the next ones
    gc.collect()


def drop_world() -> None:
    """Drop DeepSpeed's engine, all process groups and their connections, and the memory that they held."""
    import deepspeed.comm.comm
    import torch.distributed as dist
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe import p2p
    from deepspeed.utils import groups

    from megatron.parallel.reconnecting import forget_groups
    from megatron.parallel.tree import close_trees

    frozen = bool(_kept)
    if frozen:
        gc.unfreeze()  # what `keep_engine` has frozen is not among the collector's objects
    _kept.clear()
    close_trees()
    # An engine that was not built to its end is in no variable. Hooks in autograd's graph, which the collector does not
    # see, keep engine and optimizer, and with them their groups; so their attributes go.
    kept = [one for one in gc.get_objects() if issubclass(type(one), (DeepSpeedEngine, DeepSpeedOptimizer))]
    for one in kept:
        if isinstance(one, DeepSpeedEngine):
            with contextlib.suppress(AttributeError):  # of one that was not built to its end
                one.destroy()
    for one in kept:
        one.__dict__.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    forget_groups()
    checkpointing.reset()
    state: Any = deepspeed.comm.comm
    state.cdb = None
    groups._release_process_group_references()
    pipes: Any = p2p
    pipes._groups = pipes._grid = None
    gc.collect()
    if frozen:
        gc.freeze()  # imports, for the most part
