"""Checkpoints in object storage: who saves there, what is committed there, and the way of files there and back."""

from megatron.fileio.store_errors import ObjectStoreError

__all__ = ["ObjectStoreError"]
