"""Engine names, resolved lazily: naming an engine imports only that engine."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from megatron.checkpoint_engines.base import CheckpointEngine, EngineOptions
from megatron.checkpoint_engines.errors import UnknownEngineError


@dataclass(frozen=True)
class _Entry:
    module: str
    class_name: str
    summary: str


_ENGINES = {
    "torch": _Entry(
        "megatron.checkpoint_engines.torch_engine",
        "TorchEngine",
        "torch.save per file, as DeepSpeed's default",
    ),
    "none": _Entry(
        "megatron.checkpoint_engines.none_engine", "NoneEngine", "writes nothing: measures what is left"
    ),
}


def engine_names() -> list[str]:
    """All names that --checkpoint-engine takes."""
    return list(_ENGINES)


def check_engine_name(name: str) -> None:
    """Raise UnknownEngineError, listing the engines there are, for a name that is not one of them."""
    if name not in _ENGINES:
        there = ", ".join(f"{n} ({e.summary})" for n, e in _ENGINES.items())
        raise UnknownEngineError(f"--checkpoint-engine {name}: no such engine; there are: {there}")


def create_engine(name: str, options: EngineOptions) -> CheckpointEngine:
    """Import and create the engine called `name`.

    Raises UnknownEngineError if there is none of that name or its package is not installed. Never falls back.
    """
    check_engine_name(name)
    entry = _ENGINES[name]
    try:
        module = importlib.import_module(entry.module)
    except ModuleNotFoundError as exc:
        raise UnknownEngineError(
            f"--checkpoint-engine {name}: package {exc.name} is not installed; install it, or use one of: "
            + ", ".join(engine_names())
        ) from exc
    return getattr(module, entry.class_name)(options)
