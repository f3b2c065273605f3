"""Imports all slow modules, so that no later phase of a start-up and no forked rank imports them."""

from __future__ import annotations

import contextlib
import gc
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from restart_trace.startup import Interruptions

# Modules of other packages that ranks import during their start-up. A missing one is not needed.
_IN_PASSING = (
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "encodings.latin_1",
    "numpy.random",
    "psutil",
    "sentencepiece",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
)


def import_everything(imports: Interruptions | None = None) -> None:
    """Import torch, DeepSpeed and the trainer's modules. A second call takes almost no time.

    `imports`: the phase in which a rank imports; CUDA is then initialised, too.
    """
    gc.disable()  # imports create half a million objects and no garbage, so collections in between are wasted
    from megatron.startup.initialize import freeze_imported_objects, import_heavy

    import_heavy(imports)
    import megatron.checkpointing.manager
    import megatron.data.gpt_dataset
    import megatron.model.gpt_model
    import megatron.startup.engine_setup
    import megatron.startup.logging_setup
    import megatron.startup.watch
    import megatron.training.checkpoints
    import megatron.training.data
    import megatron.training.exit_conditions
    import megatron.training.log
    import megatron.training.lost_ranks
    import megatron.training.profiling
    import megatron.training.slot_memory  # noqa: F401

    freeze_imported_objects()
    gc.enable()


def import_for_forks(arguments: Iterable[str] = (), *, compiler: bool = False) -> None:
    """`import_everything`, and the modules that a rank imports before and after it: for a process that forks ranks.

    `arguments`: of the ranks. The modules of a checkpoint engine that one of them names are imported, too, and what
    the client of an object store needs; one that is not installed is for the ranks to report. `compiler`: torch's too.
    """
    import_everything()
    if compiler:
        from megatron.startup.compilation import import_compiler

        import_compiler()
    import megatron.checkpointing.engines.memory.early_copy
    import megatron.checkpointing.engines.memory.engine
    import megatron.checkpointing.engines.torch.engine
    import megatron.checkpointing.load.bucket
    import megatron.checkpointing.preflight.directories
    import megatron.checkpointing.preflight.prefetch
    import megatron.checkpointing.preflight.repeated_errors
    import megatron.checkpointing.store.bucket.generations
    import megatron.checkpointing.store.bucket.saving
    import megatron.data.given_index
    import megatron.parallel.cross_entropy
    import megatron.parallel.reconnecting
    import megatron.startup.lost_checkpoints
    import megatron.startup.once_per_host
    import megatron.startup.preflight
    import megatron.tokenizer.sentence_piece
    import megatron.tokenizer.tokenizer
    import megatron.training.as_built
    import megatron.training.free_space  # noqa: F401
    from megatron.checkpointing.engines.errors import EngineUnavailableError
    from megatron.checkpointing.engines.registry import builtin_engines, engine_class
    from megatron.config.arguments import build_parser
    from megatron.fileio.objects.bucket import preload_clients
    from restart_trace.process import versions

    arguments = list(arguments)
    preload_clients(arguments)
    words = {word.rpartition("=")[2] for word in arguments}
    for name in builtin_engines():
        if name in words:
            with contextlib.suppress(EngineUnavailableError):
                engine_class(name)
    build_parser()
    versions()  # reads all installed packages and caches the result
    for name in _IN_PASSING:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
