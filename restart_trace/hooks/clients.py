"""Hooks of libraries that train with DeepSpeed or without: their saves and loads include DeepSpeed's and torch's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from types import ModuleType

from restart_trace.hooks.guard import Around, Call, wrap
from restart_trace.hooks.session import Session


def hook_accelerate(session: Session, module: ModuleType) -> None:
    """Hook accelerate.accelerator."""
    wrap(module.Accelerator, "save_state", _around(session, "save"))
    wrap(module.Accelerator, "load_state", _around(session, "load"))


def hook_transformers(session: Session, module: ModuleType) -> None:
    """Hook transformers.trainer. It loads by DeepSpeed's load_checkpoint, apart from small files."""
    wrap(module.Trainer, "_save_checkpoint", _around(session, "save"))


def hook_function(session: Session, kind: str, name: str, module: ModuleType) -> None:
    """Hook the function `name` of `module`, such as "Trainer.save". `kind`: "save" or "load".

    Raises AttributeError if there is no such function, and TypeError if it does its work after the call.
    """
    *path, last = name.split(".")
    owner: object = module
    for part in path:
        owner = getattr(owner, part)
    function = getattr(owner, last)
    if any(kind_of(function) for kind_of in (isgeneratorfunction, iscoroutinefunction, isasyncgenfunction)):
        raise TypeError(f"{module.__name__}:{name} is a generator or a coroutine: name a function that calls it")
    if isinstance(owner, type):  # an inherited method is hooked in the class that defines it
        owner = next(one for one in owner.__mro__ if last in vars(one))
    wrap(owner, last, _around(session, kind))


def hook_models(session: Session, module: ModuleType) -> None:
    """Hook transformers.modeling_utils: a model that is built with weights from files."""

    @contextmanager
    def model_build(call: Call) -> Iterator[None]:
        with session.startup_phase("model_build"):
            yield

    wrap(module.PreTrainedModel, "from_pretrained", model_build)


def hook_safetensors(session: Session, module: ModuleType) -> None:
    """Hook safetensors.torch, by which these libraries write weights, one call for each file."""

    def hooked(kind: str) -> Around:
        @contextmanager
        def around(call: Call) -> Iterator[None]:
            path = os.fspath(call.arguments()["filename"])
            with session.file_call(kind, f"safetensors.{kind}_file", path) as running:
                if running is None:
                    yield
                    return
                with running.engine_call(path):
                    yield

        return around

    wrap(module, "save_file", hooked("save"))
    wrap(module, "load_file", hooked("load"))


def _around(session: Session, kind: str) -> Around:
    """One operation around the library's save or load. The library's own part is one opaque `engine_call`."""

    @contextmanager
    def around(call: Call) -> Iterator[None]:
        running = session.begin(kind)
        if running is None:
            yield
            return
        with session.until_end(running), running.phase("engine_call"):
            yield

    return around
