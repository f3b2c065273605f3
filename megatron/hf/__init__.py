"""Checkpoints as Hugging Face model directories, and the other way round (docs/hf.md)."""
