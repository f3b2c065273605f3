"""All groups together: defaults that come from another group, and checks between groups."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.errors import ConfigError, refuse
from megatron.config.flags import flag_name
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.trace import TraceConfig
from megatron.config.training import TrainingConfig

_FP16_FIELDS = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


class Note(NamedTuple):
    """Something the user should know about the command line though it runs; `level` is a logging level."""

    level: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration of one process; complete and consistent once constructed.

    Raises: ConfigError naming flag, value and fix.
    """

    model: ModelConfig
    parallel: ParallelConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    trace: TraceConfig = dataclasses.field(default_factory=TraceConfig)
    notes: tuple[Note, ...] = ()

    def __post_init__(self) -> None:
        self._fill_training()
        self._fill("optimizer", lr_decay_iters=lambda: self.training.train_iters)
        if self.trace.restart_trace and self.checkpoint.save is not None:
            save = self.checkpoint.save
            self._fill("trace", restart_trace_dir=lambda: os.path.join(save, "restart_trace"))
        self._check_divisible()
        self._check_stages()
        self._check_loss_scale_flags()
        object.__setattr__(self, "notes", tuple(dict.fromkeys((*self.notes, *self._own_notes()))))

    def log_notes(self, logger: logging.Logger) -> None:
        """Log the notes on rank 0; call once, when logging is set up."""
        if self.parallel.rank == 0:
            for note in self.notes:
                logger.log(note.level, "%s", note.text)

    def _fill(self, group: str, **values: Callable[[], Any]) -> None:
        """Give the fields of a group that are None their value."""
        old = getattr(self, group)
        missing = {name: value() for name, value in values.items() if getattr(old, name) is None}
        if missing:
            object.__setattr__(self, group, dataclasses.replace(old, **missing))

    def _fill_training(self) -> None:
        old, parallel = self.training, self.parallel
        new = {
            "data_parallel_size": parallel.data_parallel_size,
            "global_batch_size": old.global_batch_size or old.micro_batch_size * parallel.data_parallel_size,
            "accumulate_allreduce_grads_in_fp32": old.accumulate_allreduce_grads_in_fp32
            or self.model.params_dtype in ("fp32", "bf16"),
        }
        object.__setattr__(self, "training", dataclasses.replace(old, **new))

    def _check_divisible(self) -> None:
        tp = self.parallel.tensor_model_parallel_size
        for name in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size"):
            value = getattr(self.model, name)
            if value % tp:
                refuse(
                    flag_name(name),
                    value,
                    f"not divisible by --tensor-model-parallel-size {tp}; "
                    "use a multiple of it, or a TP that divides it",
                )

    def _check_stages(self) -> None:
        pp = self.parallel.pipeline_model_parallel_size
        if self.model.num_layers < pp:
            refuse(
                "--num-layers",
                self.model.num_layers,
                f"is less than --pipeline-model-parallel-size {pp}, so a stage would have no layer; "
                f"use at most {self.model.num_layers} stages",
            )
        if self.parallel.deepspeed_activation_checkpointing and not self.model.checkpoint_activations:
            raise ConfigError(
                "--deepspeed-activation-checkpointing says how activations are recomputed, and nothing is: "
                "add --checkpoint-activations"
            )

    def _check_loss_scale_flags(self) -> None:
        if self.model.fp16:
            return
        defaults = {field.name: field.default for field in dataclasses.fields(TrainingConfig)}
        for name in _FP16_FIELDS:
            value = getattr(self.training, name)
            if value != defaults[name]:
                refuse(
                    flag_name(name), value, f"loss scaling is for --fp16, and this run is in "
                    f"{self.model.params_dtype}; drop it or add --fp16"
                )  # fmt: skip

    def _own_notes(self) -> list[Note]:
        notes = [
            Note(logging.WARNING, f"{shown} is not read by --tokenizer-type {self.data.tokenizer_type}")
            for shown in self.data.unread_tokenizer_files
        ]
        if self.trace.restart_trace and self.trace.restart_trace_dir is None:
            notes.append(
                Note(
                    logging.WARNING,
                    "no restart trace is written: neither --save nor --restart-trace-dir is given",
                )
            )
        return notes
