"""Checkpoints in object storage: who saves there, what is committed there, and the way of files there and back."""

from megatron.fileio.objects.errors import ObjectStoreError

__all__ = ["ObjectStoreError"]
