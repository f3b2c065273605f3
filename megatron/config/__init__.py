"""Configuration of a training process: one frozen dataclass per group of command-line flags.

Imports nothing of the project and nothing heavy, since every rank runs it before anything else.
"""

from __future__ import annotations

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.combined import Config, Note
from megatron.config.data import DataConfig
from megatron.config.errors import ConfigError
from megatron.config.model import ModelConfig, padded_vocab_size
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.trace import TraceConfig
from megatron.config.training import TrainingConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "Note",
    "OptimizerConfig",
    "ParallelConfig",
    "TraceConfig",
    "TrainingConfig",
    "padded_vocab_size",
]
