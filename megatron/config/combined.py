"""All groups together: defaults that come from another group, and checks between groups."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.errors import ConfigError
from megatron.config.flags import flag_name
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.trace import TraceConfig
from megatron.config.training import TrainingConfig
from megatron.config.uris import is_uri

_FP16_FIELDS = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


_ZERO_3_ENGINES = ("torch", "lazy", "none")
# Flags that do nothing, or fail, where --zero-stage 3 divides the weights, by group, and why.
_NOT_AT_ZERO_3 = {
    "parallel": {"warmup_kernels": "--zero-stage 3 gathers the weights of a layer only in a step"},
    "training": {
        "torch_compile": "layers are not compiled with --zero-stage 3",
        "log_params_norm": "with --zero-stage 3 no rank has whole weights",
        "log_num_zeros_in_grad": "with --zero-stage 3 no rank has whole gradients",
    },
    "checkpoint": {
        "no_save_optim": "with --zero-stage 3 the weights are in the optimizer's files",
        "universal_checkpoint": "--zero-stage 3 loads only what it has saved",
        "ckpt_fully_parallel_load": "with --zero-stage 3 replicas have no weights in common",
        "export_hf_interval": "exports are made of ZeRO-1 checkpoints",
    },
}


class Note(NamedTuple):
    """A remark on a valid command line; `level` is a logging level."""

    level: int
    text: str


_info = functools.partial(Note, logging.INFO)
_warning = functools.partial(Note, logging.WARNING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of one process; complete and consistent once constructed.

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
        if self.training.train_samples is None:
            self._check_counted_in_iterations()
            self._fill("optimizer", lr_decay_iters=lambda: self.training.train_iters)
        else:
            self._check_counted_in_samples()
            self._fill("optimizer", lr_decay_samples=lambda: self.training.train_samples)
        if self.trace.restart_trace and self.checkpoint.save is not None:
            save = self.checkpoint.save
            if is_uri(save) and self.trace.restart_trace_dir is None:
                raise ConfigError(
                    f"--save {save}: the trace of a run is files, which go to no object storage: give "
                    "--restart-trace-dir DIR, or --restart-trace off"
                )
            self._fill("trace", restart_trace_dir=lambda: os.path.join(save, "restart_trace"))
        if self.trace.otlp is not None and self.trace.restart_trace_dir is None:
            self.trace.refuse(
                "otlp", "sends the restart trace, and none is written; give --save or --restart-trace-dir"
            )
        self._check_divisible()
        if self.training.log_optimizer_states_to_tensorboard and self.optimizer.optimizer != "adam":
            why = "--log-optimizer-states-to-tensorboard writes Adam's moments; drop it"
            self.optimizer.refuse("optimizer", why)
        self._check_stages()
        self._check_profile()
        self._check_compiled()
        self._check_experts()
        self._check_zero_3()
        self._check_cpu_optimizer()
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
        filled = dataclasses.replace(old, **new)
        if filled.train_samples is not None:
            iterations = filled.batch_sizes.iterations(filled.train_samples)
            # A filled-in value may come back here through dataclasses.replace.
            if old.train_iters not in (None, iterations):
                old.refuse("train_iters", f"--train-samples {old.train_samples} is given; drop one of them")
            if iterations == 0:
                old.refuse("train_samples", "is less than the first batch; raise it")
            filled = dataclasses.replace(filled, train_iters=iterations)
        object.__setattr__(self, "training", filled)

    def _check_counted_in_iterations(self) -> None:
        for name in ("lr_decay_samples", "lr_warmup_samples"):
            if getattr(self.optimizer, name):
                self.optimizer.refuse(name, "needs --train-samples instead of --train-iters")
        if self.training.rampup_batch_size:
            why = "needs --train-samples instead of --train-iters, since the iterations differ in size"
            self.training.refuse("rampup_batch_size", why)

    def _check_counted_in_samples(self) -> None:
        optimizer, train_samples = self.optimizer, self.training.train_samples
        for name in ("lr_decay_iters", "lr_warmup_iters"):
            if getattr(optimizer, name):
                instead = flag_name(name).replace("iters", "samples")
                optimizer.refuse(name, f"--train-samples {train_samples} is given; use {instead}")
        decay = optimizer.lr_decay_samples or train_samples
        if optimizer.lr_warmup_samples >= (decay or 0):
            optimizer.refuse(
                "lr_warmup_samples",
                f"must be less than the {decay} samples of the decay (--lr-decay-samples, by default --train-samples)",
            )

    def _check_divisible(self) -> None:
        tp, sp = self.parallel.tensor_model_parallel_size, self.parallel.ds_sequence_parallel_size
        for name in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size"):
            if getattr(self.model, name) % tp:
                self.model.refuse(
                    name,
                    f"not divisible by --tensor-model-parallel-size {tp}; "
                    "use a multiple of it, or a TP that divides it",
                )
            if name.endswith("heads") and getattr(self.model, name) // tp % sp:
                of_tp = f"--tensor-model-parallel-size {tp} x " if tp > 1 else ""
                self.model.refuse(
                    name,
                    f"not divisible by {of_tp}--ds-sequence-parallel-size {sp}, whose ranks each attend with a part of "
                    "the heads; use a multiple, or a smaller size",
                )
        if self.model.seq_length % sp:
            self.model.refuse("seq_length", f"not divisible by --ds-sequence-parallel-size {sp}; use a multiple of it")
        if self.parallel.splits_sequence and self.model.seq_length // sp % tp:
            of_sp = f" x --ds-sequence-parallel-size {sp}" if sp > 1 else ""
            self.model.refuse(
                "seq_length",
                f"not divisible by --tensor-model-parallel-size {tp}{of_sp}, over which --sequence-parallel splits it; "
                "use a multiple of it, or drop --sequence-parallel",
            )

    def _check_stages(self) -> None:
        pp = self.parallel.pipeline_model_parallel_size
        if self.model.num_layers < pp:
            self.model.refuse(
                "num_layers",
                f"is less than --pipeline-model-parallel-size {pp}, so a stage would have no layer; "
                f"use at most {self.model.num_layers} stages",
            )
        if self.parallel.deepspeed_activation_checkpointing and not self.model.checkpoint_activations:
            raise ConfigError(
                "--deepspeed-activation-checkpointing says how activations are recomputed, but none are: "
                "add --checkpoint-activations"
            )

    def _check_profile(self) -> None:
        training, size = self.training, self.parallel.world_size
        if training.profile is not None and self.profile_dir is None:
            training.refuse("profile", "has no directory to write to; give --tensorboard-dir or --restart-trace-dir")
        for rank in training.profile_ranks:
            if not 0 <= rank < size:
                raise ConfigError(f"--profile-ranks {rank}: there is no such rank; the last is {size - 1}")

    def _check_compiled(self) -> None:
        if not self.training.torch_compile:
            return
        for name in ("hidden_dropout", "attention_dropout"):
            if getattr(self.model, name):
                why = "--torch-compile compiles no dropout, since TP ranks have random numbers of their own; give 0, or"
                self.model.refuse(name, f"{why} drop --torch-compile")
        if self.model.recomputes_selectively:
            raise ConfigError(
                "--torch-compile decides by itself what is kept for the backward pass of a layer, and "
                "--recompute-granularity selective (or --recompute-activations) says so, too: use full, or drop one of "
                "them"
            )

    def _check_experts(self) -> None:
        if not self.model.has_experts:
            return
        shown = f"--num-experts {' '.join(map(str, self.model.num_experts))}"
        self._check_divided_experts(shown)
        if self.parallel.splits_sequence:
            raise ConfigError(
                f"{shown}: a gate sees whole sequences, and --sequence-parallel splits them over TP; drop one of them"
            )
        if self.parallel.ds_sequence_parallel_size > 1:
            self.parallel.refuse(
                "ds_sequence_parallel_size",
                f"splits the sequences whose tokens a gate of {shown} sees; drop one of them",
            )
        if self.training.torch_compile:
            raise ConfigError(f"{shown}: --torch-compile compiles no mixture of experts; drop one of them")

    def _check_zero_3(self) -> None:
        """What cannot be done where no rank has whole weights."""
        if self.parallel.zero_stage != 3:
            return
        checkpoint, drop = self.checkpoint, "drop it, or use --zero-stage 1"
        if self.model.has_experts:
            shown = " ".join(map(str, self.model.num_experts))
            raise ConfigError(f"--num-experts {shown}: --zero-stage 3 divides no experts; {drop}")
        if checkpoint.checkpoint_engine not in _ZERO_3_ENGINES:
            *others, last = _ZERO_3_ENGINES
            checkpoint.refuse(
                "checkpoint_engine",
                f"--zero-stage 3 saves with {', '.join(others)} or {last}; use one of them, or --zero-stage 1",
            )
        for group, names in _NOT_AT_ZERO_3.items():
            for name, why in names.items():
                if getattr(getattr(self, group), name):
                    raise ConfigError(f"{flag_name(name)}: {why}; {drop}")

    def _check_cpu_optimizer(self) -> None:
        if not self.optimizer.cpu_optimizer:
            return
        if self.model.bf16 and self.parallel.zero_stage == 1:
            raise ConfigError(
                "--cpu-optimizer: with --bf16 at ZeRO stage 1 DeepSpeed adds gradients up in bf16; use --fp16 or "
                "--zero-stage 3, or drop it"
            )
        if self.parallel.moe_expert_parallel_size > 1:
            raise ConfigError(
                f"--cpu-optimizer: not tried with --moe-expert-parallel-size {self.parallel.moe_expert_parallel_size}; "
                "drop one of them"
            )

    def _check_divided_experts(self, shown: str) -> None:
        ep, name = self.parallel.moe_expert_parallel_size, "moe_expert_parallel_size"
        for experts in sorted({experts for experts in self.model.experts_per_layer if experts > 1}):
            if max(experts, ep) % min(experts, ep):
                self.parallel.refuse(name, f"does not divide the {experts} experts of a layer, nor they it ({shown})")
        if ep > 1 and self.checkpoint.universal_checkpoint:
            self.parallel.refuse(name, "a universal checkpoint is loaded with 1; drop --universal-checkpoint, or this")

    @property
    def profile_dir(self) -> str | None:
        """Where --profile writes: upstream's directory, or else that of the trace."""
        trace = self.trace.restart_trace_dir if self.trace.restart_trace else None
        return self.training.tensorboard_dir or trace

    def _own_notes(self) -> Iterator[Note]:
        for shown in self.data.unread_tokenizer_files:
            yield _warning(f"{shown} is not read by --tokenizer-type {self.data.tokenizer_type}")
        yield from self._unused_loss_scale_flags()
        yield from self._notes_of_layout()
        if self.checkpoint.save is None and self.checkpoint.save_interval is not None:
            yield _warning("--save-interval: no effect, no checkpoint is saved without --save DIR")
        if self.trace.restart_trace and self.trace.restart_trace_dir is None:
            yield _warning("no restart trace is written: neither --save nor --restart-trace-dir is given")

    def _unused_loss_scale_flags(self) -> Iterator[Note]:
        if self.model.fp16:
            return
        for field in dataclasses.fields(TrainingConfig):
            value = getattr(self.training, field.name)
            if field.name in _FP16_FIELDS and value != field.default:
                yield _warning(
                    f"{flag_name(field.name)} {value}: no effect, loss scaling is for --fp16, and this run is in "
                    f"{self.model.params_dtype}"
                )

    def _notes_of_layout(self) -> Iterator[Note]:
        asked = self.parallel.zero_stage_asked
        if asked == 0:
            yield _info("--zero-stage 0: ZeRO-1 is used, which computes the same and needs less memory")
        if asked == 2:
            yield _warning(
                "--zero-stage 2: ZeRO-1 is used, which computes the same but keeps the whole gradient on every rank"
            )
        if self.parallel.sequence_parallel and not self.parallel.splits_sequence:
            yield _info("--sequence-parallel: no effect, --tensor-model-parallel-size is 1")
        if self.checkpoint.ckpt_fully_parallel_load and self.parallel.weight_copies == 1:
            yield _info("--ckpt-fully-parallel-load: no effect, there is one data-parallel replica")
        if self.parallel.splits_sequence and self.model.hidden_dropout:
            yield _info(
                "--sequence-parallel: TP ranks draw dropout masks of their own; with --hidden-dropout losses are not "
                "those of a run without the flag"
            )
        if self.parallel.no_pipeline_parallel and self.parallel.zero_stage == 1:
            yield _info("--no-pipeline-parallel: there is one stage, and DeepSpeed's pipeline engine runs it")
