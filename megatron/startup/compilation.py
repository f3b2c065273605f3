"""--torch-compile: torch.compile of a stage's transformer layers, in place, before a checkpoint is loaded.

All layers run the same code on tensors of the same shapes, so that what the first one compiles serves all of them: a
graph for each direction. Collectives and attention are calls within the graph; what lies between products is fused.
torch keeps what it has compiled in TORCHINDUCTOR_CACHE_DIR, by default torchinductor_USER in TMPDIR (or /tmp), where a
restart on the same host finds it.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from megatron.config import Config, ConfigError
from megatron.parallel.accelerator import accelerator
from megatron.startup.initialize import Runtime
from megatron.startup.kernels import from_earlier_stage

logger = logging.getLogger(__name__)
_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def import_compiler() -> None:
    """Import torch's compiler, which takes longer than torch itself."""
    import torch._dynamo.utils
    import torch._inductor.compile_fx  # noqa: F401


def compile_layers(config: Config, runtime: Runtime, model: Any) -> None:
    """Compile the transformer layers of `model`, this stage; collective over tensor-parallel groups.

    Each layer then computes with zeros in every way that the run will use, so that nothing is left to be compiled.
    Parameters and gradients stay as they are. Raises ConfigError if this torch cannot be deterministic as asked, and
    torch's own errors for code that it cannot compile.
    """
    import torch

    configure_compiler(config)
    layers = model.transformer_layers()
    inputs = from_earlier_stage(config, runtime.device, next(model.parameters()).dtype)
    with torch.no_grad():
        layers[0](inputs)  # for what is computed once, such as rotary tables: they are no part of the graph
    without_gradients = config.model.checkpoint_activations or config.training.eval_iters > 0
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=False)
        for gradients in (True, False) if without_gradients else (True,):
            _compute(layer, inputs, gradients=gradients)
    accelerator().synchronize()
    _shut_down_workers()
    found = graphs_compiled()
    logger.info(
        "--torch-compile: %s graphs compiled for %d transformer layers, %s more taken from the cache in %s",
        found.get("compiled_graphs", "all"),
        len(layers),
        found.get("cached_graphs", "no"),
        os.environ.get("TORCHINDUCTOR_CACHE_DIR"),  # torch has set it
    )


def graphs_compiled() -> dict[str, int]:
    """Graphs that this process has compiled (`compiled_graphs`) and taken from the cache (`cached_graphs`).

    Empty if torch has counted none, as with its cache switched off.
    """
    from torch._dynamo.utils import counters

    counted = counters["inductor"]
    compiled = counted["fxgraph_cache_miss"] + counted["fxgraph_cache_bypass"]
    cached = counted["fxgraph_cache_hit"]
    return {"compiled_graphs": compiled, "cached_graphs": cached} if compiled or cached else {}


def configure_compiler(config: Config) -> None:
    """Set torch's compiler for this run; `compile_layers` does. Raises ConfigError as that."""
    import torch
    from torch._inductor import config as of_torch

    inductor: Any = of_torch
    if _COMPILE_THREADS not in os.environ:
        # Else torch starts a process for each core in each rank, to compile some ten kernels.
        inductor.compile_threads = 1
    parallel, deterministic = config.parallel, bool(config.training.deterministic)
    replicates = parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel
    measured = f"torch {torch.__version__} chooses compiled kernels by their time, which differs from start to start"
    if hasattr(inductor, "deterministic"):
        # TP ranks must compute the same gradient of a weight that each of them has.
        inductor.deterministic = inductor.deterministic or deterministic or replicates
    elif deterministic:
        raise ConfigError(f"--deterministic on: {measured}; use a newer torch, or drop --torch-compile")
    elif replicates:
        logger.warning(
            "--torch-compile: %s, so that tensor-parallel ranks may round the gradients of normalizations differently; "
            "use --sequence-parallel, which sums them, or a newer torch", measured,
        )  # fmt: skip


def _compute(layer: Any, inputs: Any, *, gradients: bool) -> None:
    import torch

    if gradients:
        output = layer(inputs)
        # Not `backward`: it would add to gradients, and run DeepSpeed's hooks, which reduce them.
        torch.autograd.grad(output, [inputs, *layer.parameters()], torch.ones_like(output))
    else:
        with torch.no_grad():
            layer(inputs)  # as the first layer of a stage or of a chunk that is recomputed
            layer(inputs.detach())


def _shut_down_workers() -> None:
    """End processes that compile, which torch starts if TORCHINDUCTOR_COMPILE_THREADS asks for more than one."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()
