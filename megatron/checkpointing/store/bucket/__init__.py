"""Checkpoints in object storage: who saves there, what is committed there, and the way of files there and back."""
