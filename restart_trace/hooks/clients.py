"""Hooks of libraries that train with DeepSpeed or without: their saves and loads include DeepSpeed's and torch's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from types import ModuleType

from restart_trace.hooks.guard import Around, Call, wrap
from restart_trace.hooks.running import Running
from restart_trace.hooks.session import Session

# Methods of transformers' Trainer that load, in this order, parts of the checkpoint that it resumes from
_TRAINER_LOADS = (
    "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_callback_state", "_load_rng_state",
)  # fmt: skip


def hook_accelerate(session: Session, module: ModuleType) -> None:
    """Hook accelerate.accelerator."""
    wrap(module.Accelerator, "save_state", operation_around(session, "save", "accelerate", lambda call: call.result))
    wrap(module.Accelerator, "save_model", _weights(session, "accelerate", _save_directory))
    wrap(
        module.Accelerator,
        "load_state",
        operation_around(session, "load", "accelerate", lambda call: call.arguments()["input_dir"]),
    )


def hook_transformers(session: Session, module: ModuleType) -> None:
    """Hook transformers.trainer.

    With DeepSpeed it loads by load_checkpoint, apart from small files; otherwise by methods that are parts of one load.
    """

    @contextmanager
    def part(call: Call) -> Iterator[None]:
        directory = call.arguments().get("resume_from_checkpoint")  # of the first method alone
        with session.load_part(directory, "transformers"):
            yield

    wrap(module.Trainer, "_save_checkpoint", operation_around(session, "save", "transformers", _checkpoint_of_trainer))
    wrap(module.Trainer, "save_model", _weights(session, "transformers", _directory_of_model))
    for name in _TRAINER_LOADS:
        wrap(module.Trainer, name, part)


def _checkpoint_of_trainer(call: Call) -> str | None:
    """The directory that transformers' Trainer saves to; None in a search for hyperparameters, which has others."""
    trainer = call.args[0]
    if trainer.hp_search_backend is not None:
        return None
    return os.path.join(trainer.args.output_dir, f"checkpoint-{trainer.state.global_step}")


def _directory_of_model(call: Call) -> str:
    """The directory that Trainer.save_model writes the weights to."""
    arguments = call.arguments()
    return arguments["output_dir"] or arguments["self"].args.output_dir


def hook_lightning(session: Session, module: ModuleType) -> None:
    """Hook Lightning's trainer. It loads by torch.load."""
    wrap(
        module.Trainer,
        "save_checkpoint",
        operation_around(session, "save", "lightning", lambda call: call.arguments()["filepath"]),
    )


def hook_lightning_files(session: Session, module: ModuleType) -> None:
    """Hook Lightning's module that writes files: it serializes into memory, and then writes by fsspec."""

    @contextmanager
    def write(call: Call) -> Iterator[None]:
        path = os.fspath(call.arguments()["filepath"])
        with session.file_call("save", "lightning.fabric", path) as running:
            if running is None or running.opaque:
                yield
                return
            with running.phase("flush", "write", file=running.name_of(path)) as piece:
                yield
                if os.path.isfile(path):  # not a URL
                    piece.bytes = os.path.getsize(path)
                    running.count(piece.bytes, path)

    wrap(module, "_atomic_save", write)


def hook_torchtitan(session: Session, module: ModuleType) -> None:
    """Hook torchtitan's checkpoint manager, which saves and loads by DCP; in the background: that alone is hooked."""
    around = operation_around(session, "save", "torchtitan", lambda call: call.arguments()["checkpoint_id"])

    @contextmanager
    def save(call: Call) -> Iterator[None]:
        if call.arguments()["async_mode"].value != "disabled":
            yield
            return
        with around(call):
            yield

    wrap(module.CheckpointManager, "dcp_save", save)
    wrap(
        module.CheckpointManager,
        "dcp_load",
        operation_around(session, "load", "torchtitan", lambda call: call.arguments()["checkpoint_id"]),
    )


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
    wrap(owner, last, operation_around(session, kind))


def hook_models(session: Session, module: ModuleType) -> None:
    """Hook transformers.modeling_utils: a model that is built with weights from files, and one that is saved."""

    @contextmanager
    def model_build(call: Call) -> Iterator[None]:
        with session.startup_phase("model_build"):
            yield

    wrap(module.PreTrainedModel, "from_pretrained", model_build)
    wrap(module.PreTrainedModel, "save_pretrained", _weights(session, "transformers", _save_directory))


def hook_safetensors(session: Session, module: ModuleType) -> None:
    """Hook safetensors.torch, by which these libraries write weights, one call for each file.

    A library that was imported before has its own name for save_file, which calls serialize_file all the same.
    """

    def hooked(kind: str, place: int) -> Around:
        @contextmanager
        def around(call: Call) -> Iterator[None]:
            if "filename" not in call.kwargs and len(call.args) > place:
                filename = call.args[place]  # what `arguments` needs of a function in Rust takes milliseconds
            else:
                filename = call.arguments()["filename"]
            path = os.fspath(filename)
            with session.file_call(kind, f"safetensors.{kind}_file", path) as running:
                if running is None:
                    yield
                    return
                with running.library_call(path):
                    yield

        return around

    wrap(module, "save_file", hooked("save", 1))
    wrap(module, "serialize_file", hooked("save", 1))
    wrap(module, "load_file", hooked("load", 0))


def operation_around(
    session: Session,
    kind: str,
    library: str | None = None,
    place: Callable[[Call], str | os.PathLike[str] | None] = lambda call: None,
    *,
    weights_only: bool = False,
) -> Around:
    """One operation around the library's save or load. The library's own part is one opaque `library_call`.

    `place`: the directory or file of the checkpoint, asked before the call, and after it if it is not known before. A
    library below, such as DeepSpeed, may name the checkpoint and its engine, too: then that counts. What saves
    `weights_only` is not the engine of the job.
    """

    @contextmanager
    def around(call: Call) -> Iterator[None]:
        path = place(call)  # a trainer of another version may raise here: before an operation is open
        running = session.begin(kind, weights_only=weights_only)
        if running is None:
            yield
            return
        with session.until_end(running):
            _label(running, path, library)
            with running.phase("library_call"):
                yield
            if path is None:
                path = place(call)
                _label(running, path, library)
        if path is not None and "://" not in os.fspath(path):
            path = os.path.abspath(path)
            directory = path if os.path.isdir(path) else os.path.dirname(path)
            session.record_directory(kind, directory, library if kind == "save" and not weights_only else None)

    return around


def _weights(session: Session, library: str, place: Callable[[Call], str | os.PathLike[str] | None]) -> Around:
    """One save around a function that writes weights alone to the directory `place`, which some jobs do on one rank."""
    return operation_around(session, "save", library, place, weights_only=True)


def _save_directory(call: Call) -> str | os.PathLike[str]:
    directory: str | os.PathLike[str] = call.arguments()["save_directory"]
    return directory


def _label(running: Running, path: str | os.PathLike[str] | None, library: str | None) -> None:
    if path is not None:
        running.operation.label(tag=os.path.basename(os.fspath(path).rstrip("/")), engine=library)
