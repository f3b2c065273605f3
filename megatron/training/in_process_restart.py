"""In-process restarts in the trainer: which runs can have them, and what is undone between two starts of a process."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

from megatron.config import CheckpointConfig, Config, ConfigError
from megatron.processes.in_process_restart import at_return, is_possible

# Whose saves and loads leave no thread and no process behind, as runs have shown.
ENGINES = ("torch", "lazy", "memory")


def refusal(options: CheckpointConfig, *, compiles: bool, zero_stage: int = 1) -> str | None:
    """Why a run with these flags cannot have in-process restarts; None if it can. `compiles`: --torch-compile."""
    if (options.save or options.load) is not None and options.checkpoint_engine not in ENGINES:
        return (
            f"--checkpoint-engine {options.checkpoint_engine} with --in-process-restart: its threads and processes are "
            f"not known to end with a start; use {' or '.join(ENGINES)}, or leave out --in-process-restart"
        )
    untried = {
        f"--save {options.save}, --load {options.load}": options.in_object_storage,
        f"--export-hf-interval {options.export_hf_interval}": options.export_hf_interval is not None,
        "--torch-compile": compiles,
        f"--zero-stage {zero_stage}": zero_stage == 3,
    }
    for given, refused in untried.items():
        if refused:
            return f"{given} with --in-process-restart: not tried together; leave out --in-process-restart"
    return None


def prepare_to_return(config: Config) -> None:
    """In a rank that returns after the failure of another one: have the world of this start dropped then.

    Raises ConfigError for flags that refuse it.
    """
    if not is_possible():
        return
    why = refusal(config.checkpoint, compiles=config.training.torch_compile, zero_stage=config.parallel.zero_stage)
    if why is not None:
        raise ConfigError(why)
    at_return(drop_world)


def drop_world() -> None:
    """Drop DeepSpeed's engine, all process groups and their connections, and the memory that they held."""
    import deepspeed.comm.comm
    import torch.distributed as dist
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe import p2p
    from deepspeed.utils import groups

    from megatron.parallel.tree import close_trees

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
    checkpointing.reset()  # its buffers may hold the layers of half a step, and would have no place for the next ones
    state: Any = deepspeed.comm.comm
    state.cdb = None
    groups._release_process_group_references()
    pipes: Any = p2p
    pipes._groups = pipes._grid = None
    gc.collect()
