"""Saving and loading checkpoints over all ranks. Its public names are what tools may import of it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.checkpointing.engines.registry import (
        builtin_engines,
        check_engine_name,
        engine_names,
        is_redistributable,
    )
    from megatron.checkpointing.manager import load_checkpoint, save_checkpoint
    from megatron.checkpointing.store.bucket.checkpoints import StoredCandidate, open_checkpoints
    from megatron.checkpointing.store.search import Candidate, discover
    from megatron.fileio.objects.errors import ObjectStoreError

__all__ = [
    "Candidate", "ObjectStoreError", "StoredCandidate", "builtin_engines", "check_engine_name", "discover",
    "engine_names", "is_redistributable", "load_checkpoint", "open_checkpoints", "save_checkpoint",
]  # fmt: skip

_PUBLIC = {
    "megatron.fileio.objects.errors": ("ObjectStoreError",),
    "megatron.checkpointing.engines.registry": (
        "builtin_engines",
        "check_engine_name",
        "engine_names",
        "is_redistributable",
    ),
    "megatron.checkpointing.manager": ("load_checkpoint", "save_checkpoint"),
    "megatron.checkpointing.store.bucket.checkpoints": ("StoredCandidate", "open_checkpoints"),
    "megatron.checkpointing.store.search": ("Candidate", "discover"),
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: most modules in this package work without torch."""
    for module, names in _PUBLIC.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
