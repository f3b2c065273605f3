"""Hooks of DeepSpeed: its start-up, its saves and loads, and every checkpoint engine that it may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

from restart_trace.hooks.coordinates import coordinates_of
from restart_trace.hooks.guard import Around, Call, wrap
from restart_trace.hooks.running import Running
from restart_trace.hooks.session import Session
from restart_trace.recorder import given

# The parts of a save by DeepSpeedEngine outside of its checkpoint engine: they gather and copy the state.
_COLLECTING = (
    "_create_checkpoint_file", "_create_zero_checkpoint_files", "_save_checkpoint", "_save_moe_checkpoint",
    "_save_zero_checkpoint", "_consolidated_16bit_state_dict", "_zero3_consolidated_16bit_state_dict",
)  # fmt: skip
# The parts of load_checkpoint: each applies what was read to model and optimizer, and gathers, within one call.
_RESTORING = ("_load_checkpoint", "_load_zero_checkpoint")
_TORCH_ENGINE = "TorchCheckpointEngine"


class DeepSpeedHooks:
    """Around DeepSpeed's engine and its checkpoint engines."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._uncommitted: Running | None = None  # a decoupled engine's save that is not committed yet

    @contextmanager
    def initialize(self, call: Call) -> Iterator[None]:
        """Around deepspeed.initialize."""
        with self._session.startup_phase("engine_init"):
            yield
        if self._session.recorder is not None:
            from deepspeed.utils import groups

            engine = call.result[0]
            self._session.record_coordinates(coordinates_of(engine, groups))
            self._session.record_runtime(_runtime(engine))

    @contextmanager
    def model_build(self, call: Call) -> Iterator[None]:
        """Around PipelineModule."""
        with self._session.startup_phase("model_build"):
            yield

    @contextmanager
    def save(self, call: Call) -> Iterator[None]:
        """Around save_checkpoint."""
        arguments = call.arguments()
        engine, tag = arguments["self"], arguments["tag"]
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        with self._operation("save", engine, arguments["save_dir"]) as running:
            if running is not None:
                running.operation.label(tag=tag, step=engine.global_steps)
            yield
            if running is not None and engine.checkpoint_engine.is_decoupled():
                running.unfinished = True
                self._uncommitted = running

    @contextmanager
    def save_weights(self, call: Call) -> Iterator[None]:
        """Around save_16bit_model, which writes all weights into one file; with ZeRO-3 only if the config allows it."""
        arguments = call.arguments()
        engine, directory = arguments["self"], arguments["save_dir"]
        if engine.zero_optimization_partition_weights() and not engine.zero_gather_16bit_weights_on_model_save():
            yield
            return
        with self._operation("save", engine, directory, weights_only=True) as running:
            if running is not None:
                running.operation.label(tag=arguments["save_filename"], step=engine.global_steps)
            yield

    @contextmanager
    def load(self, call: Call) -> Iterator[None]:
        """Around load_checkpoint. Tag and step are known at its end."""
        arguments = call.arguments()
        with self._operation("load", arguments["self"], arguments["load_dir"]) as running:
            yield
            path = call.result[0]
            if running is not None and path is not None:
                tag = os.path.basename(os.path.dirname(str(path)))
                running.operation.label(tag=tag, step=arguments["self"].global_steps)

    @contextmanager
    def _operation(
        self, kind: str, engine: Any, directory: Any, *, weights_only: bool = False
    ) -> Iterator[Running | None]:
        """A new save or load, or DeepSpeed's part of one that a library has begun."""
        checkpoint_engine = type(engine.checkpoint_engine)
        for one in checkpoint_engine.__mro__:
            self._hook_checkpoint_engine(one)
        self._session.record_directory(kind, os.path.abspath(directory), checkpoint_engine.__name__)
        begun = self._session.begin(kind, weights_only=weights_only)
        running = begun or self._session.running()
        if running is None:
            yield None
            return
        running.operation.label(engine=checkpoint_engine.__name__)
        operation = nullcontext() if begun is None else self._session.until_end(begun)
        with operation, running.within_deepspeed(str(directory)):
            yield running

    @contextmanager
    def commit_decoupled(self, call: Call) -> Iterator[None]:
        """Around _commit_decoupled_checkpoint, which waits for the helper process before the optimizer's step."""
        running, self._uncommitted = self._uncommitted, None
        if running is None:
            yield
            return
        with self._session.resumed(running), running.phase("commit", "publish"):
            yield

    def phase(self, name: str) -> Around:
        """Around a function that is one phase, except for the phases within it."""

        @contextmanager
        def around(call: Call) -> Iterator[None]:
            running = self._session.running()
            if running is None or running.opaque:
                yield
                return
            if running.kind == "load":  # the time between the parts of this call belongs to it, too
                running.between(name)
            with running.phase(name):
                yield

        return around

    @contextmanager
    def library_call(self, call: Call) -> Iterator[None]:
        """Around a method of a checkpoint engine that is not torch's."""
        running = self._session.running()
        if running is None:
            yield
            return
        with running.library_call(call.arguments().get("path")):
            yield

    @contextmanager
    def commit(self, call: Call) -> Iterator[None]:
        """Around an engine's commit. After it DeepSpeed publishes the checkpoint, before the last barrier."""
        running = self._session.running()
        if running is None or running.opaque:
            yield
            return
        is_torch = type(call.args[0]).__name__ == _TORCH_ENGINE
        with running.phase("commit", "publish") if is_torch else running.library_call():
            yield
        if running.kind == "save":
            running.between("commit", "publish")

    def _hook_checkpoint_engine(self, engine: type) -> None:
        """Hook the methods that a class of checkpoint engines defines. torch's calls torch.save, which is hooked."""
        if engine.__name__ != _TORCH_ENGINE:
            for name in ("create", "save", "load"):
                wrap(engine, name, self.library_call)
        wrap(engine, "commit", self.commit)


def hook(session: Session, deepspeed: ModuleType) -> None:
    """Hook deepspeed."""
    hooks = DeepSpeedHooks(session)
    engine = deepspeed.DeepSpeedEngine
    wrap(deepspeed, "initialize", hooks.initialize)
    wrap(deepspeed.PipelineModule, "__init__", hooks.model_build)
    wrap(engine, "save_checkpoint", hooks.save)
    wrap(engine, "save_16bit_model", hooks.save_weights)
    wrap(engine, "load_checkpoint", hooks.load)
    wrap(engine, "_checkpoint_tag_validation", hooks.phase("tag_validation"))
    wrap(engine, "_commit_decoupled_checkpoint", hooks.commit_decoupled)
    for name in _COLLECTING:
        wrap(engine, name, hooks.phase("collect"))
    for name in _RESTORING:
        wrap(engine, name, hooks.phase("library_call"))


def _runtime(engine: Any) -> dict[str, Any]:
    """Fields of the runtime record, which describe what DeepSpeed has built."""
    import torch.distributed as dist

    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return given({
        "engine_used": type(engine.checkpoint_engine).__name__,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "accelerator": engine.device.type,
        "backend": dist.get_backend(),
        "parameters": sum(_numel(parameter) for parameter in engine.module.parameters()),
    })  # fmt: skip


def _numel(parameter: Any) -> int:
    """With ZeRO-3, which keeps a part of each parameter on a rank, of the whole of it."""
    return getattr(parameter, "ds_numel", parameter.numel())
