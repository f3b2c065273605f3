"""Engine names, resolved lazily: naming an engine imports only that engine.

Third parties add engines through the entry point group `megatron.checkpoint_engines`; docs/engines.md says how.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING

from megatron.checkpointing.engines.entries import ENGINES, EngineEntry
from megatron.checkpointing.engines.errors import EngineUnavailableError, UnknownEngineError
from megatron.config.errors import refuse

if TYPE_CHECKING:
    from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions

ENTRY_POINT_GROUP = "megatron.checkpoint_engines"


def builtin_engines() -> dict[str, EngineEntry]:
    """Name -> entry of the engines of this project."""
    return dict(ENGINES)


def _plugins() -> dict[str, importlib.metadata.EntryPoint]:
    """Engines of other packages. Looked for only when a name is not one of ours: it takes 10 ms and more."""
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return {point.name: point for point in found if point.name not in ENGINES}


def engine_names() -> list[str]:
    """All names that --checkpoint-engine takes."""
    return [*ENGINES, *_plugins()]


def check_engine_name(name: str, *, in_object_storage: bool = False) -> None:
    """Raise UnknownEngineError, listing the engines there are, for a name that is not one of them.

    `in_object_storage`: checkpoints are saved there, or loaded from there; raises ConfigError for an engine that does
    not save there. Raises EngineUnavailableError if the engine is known and its package is not installed. Imports
    neither torch nor the engine.
    """
    if name in ENGINES:
        entry = ENGINES[name]
        missing = [module for module in entry.requires if importlib.util.find_spec(module) is None]
        if missing:
            raise EngineUnavailableError(
                f"--checkpoint-engine {name}: package {', '.join(missing)} is not installed; install it "
                f"({entry.install}), or use another engine: {', '.join(ENGINES)}"
            )
    elif name not in (plugins := _plugins()):
        there = [f"{n} ({e.summary})" for n, e in ENGINES.items()]
        there += [f"{n} (of {p.value})" for n, p in plugins.items()]
        raise UnknownEngineError(f"--checkpoint-engine {name}: no such engine; there are: {', '.join(there)}")
    if in_object_storage:
        _check_object_storage(name)


def _check_object_storage(name: str) -> None:
    why = ENGINES[name].not_stored if name in ENGINES else "an engine of another package has not been tried there"
    if why:
        *names, last = engines_of_object_storage()
        why = f"does not save to object storage: {why}; use {', '.join(names)} or {last}"
        refuse("--checkpoint-engine", name, why)


def is_redistributable(name: str) -> bool | None:
    """Whether a checkpoint of the engine called `name` can be loaded onto another layout, without importing it.

    None for an engine of another package, which has to be imported to know.
    """
    return ENGINES[name].redistributable if name in ENGINES else None


def why_not_returning(name: str) -> str:
    """Why a process that has used the engine called `name` does not start again; "" if it does. Imports nothing."""
    if name not in ENGINES:
        return "an engine of another package, whose threads and processes are not known to end with a start"
    return ENGINES[name].not_returning


def redistributable_engines() -> list[str]:
    """Names of the engines of this project whose checkpoints can be loaded onto another layout."""
    return [name for name, entry in ENGINES.items() if entry.redistributable]


def engines_of_object_storage() -> list[str]:
    """Names of the engines of this project that save to object storage."""
    return [name for name, entry in ENGINES.items() if not entry.not_stored]


def engine_class(name: str) -> type[CheckpointEngine]:
    """Import the engine called `name` and return its class. Never falls back.

    Raises UnknownEngineError if there is none of that name, EngineUnavailableError if what it imports is not
    installed.
    """
    check_engine_name(name)
    try:
        if name not in ENGINES:
            return _plugins()[name].load()
        return getattr(importlib.import_module(ENGINES[name].module), ENGINES[name].class_name)
    except ModuleNotFoundError as exc:
        raise EngineUnavailableError(
            f"--checkpoint-engine {name}: package {exc.name} is not installed; install it, or use one of: "
            + ", ".join(ENGINES)
        ) from exc


def create_engine(name: str, options: EngineOptions) -> CheckpointEngine:
    """Import and create the engine called `name`; raises as `engine_class` does."""
    return engine_class(name)(options)
