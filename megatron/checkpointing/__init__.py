"""Saving and loading checkpoints over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.checkpointing.manager import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]


def __getattr__(name: str) -> Any:
    """The public functions, imported when they are asked for: most modules in this package work without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.checkpointing import manager

    return getattr(manager, name)
