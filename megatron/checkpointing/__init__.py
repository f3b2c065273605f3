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
    from megatron.checkpointing.store.bucket.checkpoints import ObjectStoreError, StoredCandidate, open_checkpoints
    from megatron.checkpointing.store.commit import Candidate, discover

__all__ = [
    "Candidate", "ObjectStoreError", "StoredCandidate", "builtin_engines", "check_engine_name", "discover",
    "engine_names", "is_redistributable", "load_checkpoint", "open_checkpoints", "save_checkpoint",
]  # fmt: skip

_PUBLIC = {
    "engines.registry": ("builtin_engines", "check_engine_name", "engine_names", "is_redistributable"),
    "manager": ("load_checkpoint", "save_checkpoint"),
    "store.bucket.checkpoints": ("ObjectStoreError", "StoredCandidate", "open_checkpoints"),
    "store.commit": ("Candidate", "discover"),
}


def __getattr__(name: str) -> Any:
    """The public names, imported when they are asked for: most modules in this package work without torch."""
    for module, names in _PUBLIC.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
