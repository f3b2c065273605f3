"""Installs the hooks: into modules that are already imported, and into others when they are imported."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

from restart_trace.clock import now_ns
from restart_trace.hooks import (
    agent,
    clients,
    compilation,
    deepspeed_engine,
    distributed,
    distributed_checkpoint,
    serialization,
    steps,
)
from restart_trace.hooks.guard import Call, wrap
from restart_trace.hooks.imports import ImportWatcher
from restart_trace.hooks.session import DIRECTORY_VARIABLE, FUNCTION_VARIABLES, Session, check_function
from restart_trace.hooks.steps import Steps

# Module -> function that installs its hooks. torch imports torch.distributed, and deepspeed its engines.
_HOOKED: dict[str, Callable[[Session, ModuleType], None]] = {
    "torch": serialization.hook,
    "torch.distributed": distributed.hook,
    "torch.distributed.checkpoint": distributed_checkpoint.hook,
    "torch.distributed.fsdp": distributed.hook_fsdp,
    "torch.utils.cpp_extension": compilation.hook_extensions,
    "torch._dynamo.convert_frame": compilation.hook_graphs,
    "deepspeed.comm.torch": distributed.hook_deepspeed,
    "deepspeed": deepspeed_engine.hook,
    "accelerate.accelerator": clients.hook_accelerate,
    "transformers.trainer": clients.hook_transformers,
    "transformers.modeling_utils": clients.hook_models,
    "safetensors.torch": clients.hook_safetensors,
    "lightning.pytorch.trainer.trainer": clients.hook_lightning,
    "pytorch_lightning.trainer.trainer": clients.hook_lightning,
    "lightning.fabric.utilities.cloud_io": clients.hook_lightning_files,
    "lightning_fabric.utilities.cloud_io": clients.hook_lightning_files,
    "torch.distributed.elastic.agent.server.local_elastic_agent": agent.hook,
}
# The same, of the modules in which steps are seen.
_STEPS: dict[str, Callable[[Steps, ModuleType], None]] = {
    "torch.autograd": steps.hook_backward,
    "torch.optim.optimizer": steps.hook_optimizers,
    "torch.utils.data.dataloader": steps.hook_data,
    "torch.nn.parallel.distributed": steps.hook_ddp,
    "deepspeed": steps.hook_engines,
    "accelerate.data_loader": steps.hook_accelerate_data,
    "lightning.pytorch.loops.fetchers": steps.hook_lightning_data,
    "pytorch_lightning.loops.fetchers": steps.hook_lightning_data,
    "transformers.trainer": steps.hook_transformers,
}
_session: Session | None = None
_of_session: Steps | None = None
logger = logging.getLogger(__name__)


def install(
    trace_dir: str | os.PathLike[str] | None = None, *, saves: Sequence[str] = (), loads: Sequence[str] = ()
) -> None:
    """Trace this process if it is, or becomes, a rank. Call it before torch is imported; earlier events are not traced.

    `trace_dir`: directory of the trace; by default RESTART_TRACE_HOOKS_DIR, or else `restart-trace` in the working
    directory. `saves` and `loads`: further functions that save or load a checkpoint, as "mypackage.module:Class.f"; by
    default those of RESTART_TRACE_HOOKS_SAVES and RESTART_TRACE_HOOKS_LOADS. A second call has no effect.
    Raises ValueError for an invalid name.
    """
    global _session, _of_session
    if _session is not None:
        return
    directory = trace_dir or os.environ.get(DIRECTORY_VARIABLE) or "restart-trace"
    session = _session = Session(Path(directory).absolute(), now_ns())
    of_session = _of_session = Steps(session)
    watched: dict[str, list[Callable[[ModuleType], None]]] = {
        name: [partial(hook, session)] for name, hook in _HOOKED.items()
    }
    for name, hook in _STEPS.items():
        watched.setdefault(name, []).append(partial(hook, of_session))
    for kind, given in (("save", saves), ("load", loads)):
        for function in given or os.environ.get(FUNCTION_VARIABLES[kind], "").split():
            module, _, name = check_function(function).partition(":")
            watched.setdefault(module, []).append(partial(clients.hook_function, session, kind, name))
            atexit.register(_report_unless_imported, session, module, function)
    wrap(sys, "exit", partial(_exit, session))
    watcher = ImportWatcher(watched, frozenset({"torch"}), session.open_if_rank, session.imported)
    sys.meta_path.insert(0, watcher)  # type: ignore[arg-type]
    for name in watched:
        if name in sys.modules:
            session.open_if_rank()
            watcher.imported_already(sys.modules[name])


def step(number: int) -> None:
    """Say that this rank has finished training step `number` of the run, the first of which is 1.

    For a program whose steps the hooks cannot see or number. No effect in a process that is not traced.
    """
    if _of_session is not None:
        _of_session.told(number)


@contextmanager
def _exit(session: Session, call: Call) -> Iterator[None]:
    """Around sys.exit, which raises SystemExit."""
    if session.is_training_thread():
        session.exits(call.args[0] if call.args else None)
    yield


def _report_unless_imported(session: Session, module: str, function: str) -> None:
    """At the end of a rank: log that a requested function was not traced since its module was never imported."""
    if session.recorder is not None and module not in sys.modules:
        logger.error("restart_trace: %s was not traced: no module %s was imported", function, module)
