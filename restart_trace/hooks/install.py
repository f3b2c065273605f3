"""Installs the hooks: into modules that are already imported, and into others when they are imported.

Each Python process of a job runs this at its start, most of them for nothing: so it imports almost nothing. The hooks,
and the session that they share, are imported when the program imports a library that has hooks.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from _thread import get_ident

from restart_trace.hooks.imports import ImportWatcher
from restart_trace.hooks.variables import DIRECTORY_VARIABLE, FUNCTION_VARIABLES, RANK_PID_VARIABLE, check_function

TYPE_CHECKING = False  # that of `typing`, which takes as long to import as Python to start
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any

    from restart_trace.hooks.session import Session
    from restart_trace.hooks.steps import Steps

# Module -> module of this package and its function that installs the hooks, given the session. torch imports
# torch.distributed, and deepspeed its engines.
_HOOKED = {
    "torch": "serialization.hook",
    "torch.distributed": "distributed.hook",
    "torch.distributed.checkpoint": "distributed_checkpoint.hook",
    "torch.distributed.fsdp": "distributed.hook_fsdp",
    "torch.utils.cpp_extension": "compilation.hook_extensions",
    "torch._dynamo.convert_frame": "compilation.hook_graphs",
    "torch._dynamo.callback": "compilation.hook_backward_graphs",
    "triton.compiler": "triton_compiler.hook",
    "deepspeed.comm.torch": "distributed.hook_deepspeed",
    "deepspeed": "deepspeed_engine.hook",
    "accelerate.accelerator": "clients.hook_accelerate",
    "transformers.trainer": "clients.hook_transformers",
    "transformers.modeling_utils": "clients.hook_models",
    "safetensors.torch": "clients.hook_safetensors",
    "lightning.pytorch.trainer.trainer": "clients.hook_lightning",
    "pytorch_lightning.trainer.trainer": "clients.hook_lightning",
    "lightning.fabric.utilities.cloud_io": "clients.hook_lightning_files",
    "lightning_fabric.utilities.cloud_io": "clients.hook_lightning_files",
    "torchtitan.components.checkpointer.dcp": "clients.hook_torchtitan",
    "torchtitan.components.checkpoint": "clients.hook_torchtitan",  # until 0.2
    "megatron.core.dist_checkpointing.serialization": "megatron_core.hook",
    "megatron.core.dist_checkpointing.strategies.filesystem_async": "megatron_core.hook_writer",
    "torch.distributed.elastic.agent.server.local_elastic_agent": "agent.hook",
}
# The same, of the modules in which steps are seen: the function is given the steps of the session.
_STEPS = {
    "torch.autograd": "steps.hook_backward",
    "torch.optim.optimizer": "steps.hook_optimizers",
    "torch.utils.data.dataloader": "steps.hook_data",
    "torch.nn.parallel.distributed": "steps.hook_ddp",
    "deepspeed": "steps.hook_engines",
    "accelerate.data_loader": "steps.hook_accelerate_data",
    "lightning.pytorch.loops.fetchers": "steps.hook_lightning_data",
    "pytorch_lightning.loops.fetchers": "steps.hook_lightning_data",
    "transformers.trainer": "steps.hook_transformers",
}


class _Hooks:
    """The session of this process and its steps, made when the program imports the first library that has hooks."""

    def __init__(self, directory: str) -> None:
        self._directory = directory if os.path.isabs(directory) else os.path.join(os.getcwd(), directory)
        self.session: Session | None = None
        self.steps: Steps | None = None
        self._begin()
        os.register_at_fork(after_in_child=self._forked)

    def begin(self) -> tuple[Session, Steps]:
        """The session and its steps."""
        if self.session is None or self.steps is None:
            from pathlib import Path

            from restart_trace.hooks.session import Session
            from restart_trace.hooks.steps import Steps

            self.session = Session(Path(self._directory), self._installed_ns, self._imports, self._thread)
            self.steps = Steps(self.session)
        return self.session, self.steps

    def open_if_rank(self) -> None:
        """Open the trace if the environment says that this process is a rank."""
        self.begin()[0].open_if_rank()

    def imported(self, start_ns: int, own_ns: int, end_ns: int) -> None:
        """Note an import by the program, including the imports that it caused; the hooks took `own_ns` of it."""
        if self.session is None:
            self._imports.append((start_ns, own_ns, end_ns))
        else:
            self.session.imported(start_ns, own_ns, end_ns)

    def of_session(self, name: str) -> Callable[[ModuleType], None]:
        """The function "module.function" of this package, given the session."""
        return lambda module: _function(name)(self.begin()[0], module)

    def of_steps(self, name: str) -> Callable[[ModuleType], None]:
        """The function "module.function" of this package, given the steps of the session."""
        return lambda module: _function(name)(self.begin()[1], module)

    def named(self, kind: str, function: str) -> Callable[[ModuleType], None]:
        """Hooks a function that the user names."""

        def hook(module: ModuleType) -> None:
            from restart_trace.hooks.clients import hook_function

            hook_function(self.begin()[0], kind, function, module)

        return hook

    def _begin(self) -> None:
        """Since when, the imports so far, and the thread that trains. A process that was forked begins then."""
        self._installed_ns = time.monotonic_ns()
        self._imports: list[tuple[int, int, int]] = []
        self._thread = get_ident()

    def _forked(self) -> None:
        self._begin()
        if self.session is None and "RANK" in os.environ:  # the session, once there is one, sees to it itself
            os.environ.setdefault(RANK_PID_VARIABLE, "0")


_hooks: _Hooks | None = None


def install(
    trace_dir: str | os.PathLike[str] | None = None, *, saves: Sequence[str] = (), loads: Sequence[str] = ()
) -> None:
    """Trace this process if it is, or becomes, a rank. Call it before torch is imported; earlier events are not traced.

    `trace_dir`: directory of the trace; by default RESTART_TRACE_HOOKS_DIR, or else `restart-trace` in the working
    directory. `saves` and `loads`: further functions that save or load a checkpoint, as "mypackage.module:Class.f"; by
    default those of RESTART_TRACE_HOOKS_SAVES and RESTART_TRACE_HOOKS_LOADS. A second call has no effect.
    Raises ValueError for an invalid name.
    """
    global _hooks
    if _hooks is not None:
        return
    hooks = _hooks = _Hooks(os.fspath(trace_dir or os.environ.get(DIRECTORY_VARIABLE) or "restart-trace"))
    watched: dict[str, list[Callable[[ModuleType], None]]] = {
        name: [hooks.of_session(function)] for name, function in _HOOKED.items()
    }
    for name, function in _STEPS.items():
        watched.setdefault(name, []).append(hooks.of_steps(function))
    for kind, given in (("save", saves), ("load", loads)):
        for function in given or os.environ.get(FUNCTION_VARIABLES[kind], "").split():
            module, _, name = check_function(function).partition(":")
            watched.setdefault(module, []).append(hooks.named(kind, name))
            atexit.register(_report_unless_imported, hooks, module, function)
    _note_exit_status(hooks)
    watcher = ImportWatcher(watched, frozenset({"torch"}), hooks.open_if_rank, hooks.imported)
    sys.meta_path.insert(0, watcher)  # type: ignore[arg-type]
    for name in watched:
        if name in sys.modules:
            hooks.open_if_rank()
            watcher.imported_already(sys.modules[name])


def step(number: int) -> None:
    """Say that this rank has finished training step `number` of the run, the first of which is 1.

    For a program whose steps the hooks cannot see or number. No effect in a process that is not traced.
    """
    if _hooks is not None and _hooks.steps is not None:
        _hooks.steps.told(number)


def _function(name: str) -> Callable[[Any, ModuleType], None]:
    from importlib import import_module

    module, _, function = name.partition(".")
    return getattr(import_module(f"restart_trace.hooks.{module}"), function)


def _note_exit_status(hooks: _Hooks) -> None:
    """Hook sys.exit, which raises SystemExit, before the program gets hold of it."""
    original = sys.exit

    def exit(*status: Any) -> None:
        if hooks.session is not None and hooks.session.is_training_thread():
            hooks.session.exits(status[0] if status else None)
        original(*status)

    # As functools.wraps does, which would have to be imported: a program may pickle it, or look at its signature.
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(exit, name, getattr(original, name))
    exit.__wrapped__ = original  # type: ignore[attr-defined]
    sys.exit = exit  # type: ignore[assignment]


def _report_unless_imported(hooks: _Hooks, module: str, function: str) -> None:
    """At the end of a rank: log that a requested function was not traced since its module was never imported."""
    if hooks.session is not None and hooks.session.recorder is not None and module not in sys.modules:
        import logging

        text = "restart_trace: %s was not traced: no module %s was imported"
        logging.getLogger(__name__).error(text, function, module)
