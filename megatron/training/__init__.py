"""Training: set-up, loop, data, logging, exit conditions. Only pretrain_gpt.py imports this package."""

from __future__ import annotations

from megatron.training.trainer import pretrain

__all__ = ["pretrain"]
