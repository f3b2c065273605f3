"""Megatron-DeepSpeed with built-in restart instrumentation. Importing this package imports nothing heavy."""

from __future__ import annotations

__version__ = "0.1.0"
