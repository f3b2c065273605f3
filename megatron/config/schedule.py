"""The settings of the learning-rate and weight-decay schedule, and whether a checkpoint's are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.errors import ConfigError
from megatron.config.optimizer import OptimizerConfig
from megatron.config.training import TrainingConfig

SET_BY = {
    "max_lr": "--lr",
    "lr_warmup_steps": "samples: --lr-warmup-iters or --lr-warmup-fraction, by --global-batch-size",
    "lr_decay_style": "--lr-decay-style",
    "lr_decay_steps": "samples: --lr-decay-iters, which is --train-iters by default, by --global-batch-size",
    "min_lr": "--min-lr",
    "start_wd": "--start-weight-decay or --weight-decay",
    "end_wd": "--end-weight-decay or --weight-decay",
    "wd_incr_style": "--weight-decay-incr-style",
    "wd_incr_steps": "samples: --train-iters by --global-batch-size",
}
"""Setting -> the flags that decide it."""


def schedule_settings(optimizer: OptimizerConfig, training: TrainingConfig) -> dict[str, Any]:
    """The schedule of a run under upstream's names; valid for the groups of a Config.

    "Steps" are samples, so that a schedule does not depend on the global batch size.
    """
    batch, train_samples = training.global_batch_size, training.train_samples
    warmup: float
    if train_samples is not None:
        decay = optimizer.lr_decay_samples or train_samples
        warmup = optimizer.lr_warmup_samples
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * decay
    else:
        decay_iters = optimizer.lr_decay_iters or training.train_iters
        warmup_iters: float = optimizer.lr_warmup_iters
        if optimizer.lr_warmup_fraction is not None:
            warmup_iters = optimizer.lr_warmup_fraction * decay_iters
        warmup, decay = warmup_iters * batch, decay_iters * batch
    return {
        "max_lr": float(optimizer.lr),
        "lr_warmup_steps": warmup,
        "lr_warmup_tokens": optimizer.lr_warmup_tokens,
        "lr_decay_style": optimizer.lr_decay_style,
        "lr_decay_steps": decay,
        "lr_decay_tokens": optimizer.lr_decay_tokens,
        "min_lr": optimizer.min_lr,
        "start_wd": optimizer.start_weight_decay,
        "end_wd": optimizer.end_weight_decay,
        "wd_incr_style": optimizer.weight_decay_incr_style,
        "wd_incr_steps": train_samples or training.train_iters * batch,
    }


def has_no_effect(settings: Mapping[str, Any], name: str) -> bool:
    """Whether a schedule does not use one of its settings, such as the length of a decay of style constant."""
    if settings["lr_decay_style"] == "constant" and name in ("lr_decay_steps", "lr_decay_tokens", "min_lr"):
        return True
    if settings["lr_decay_tokens"] is not None and name == "lr_decay_steps":
        return True
    return settings["wd_incr_style"] == "constant" and name == "wd_incr_steps"


def is_derived(settings: Mapping[str, Any], name: str) -> bool:
    """Whether a run finds the setting out while it trains, and takes it from a checkpoint."""
    return name == "lr_warmup_tokens" and settings["lr_warmup_steps"] > 0


def check_same_schedule(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raises ConfigError naming a setting in which the command line (`mine`) and a checkpoint (`theirs`) disagree.

    What the checkpoint does not tell is not compared.
    """
    for name, value in mine.items():
        if name not in theirs or has_no_effect(mine, name) or is_derived(mine, name) or value == theirs[name]:
            continue
        raise ConfigError(
            f"learning-rate schedule: {name} is {theirs[name]} in the checkpoint and {value} here "
            f"({SET_BY.get(name, 'in tokens, as upstream counts')}); give the same schedule, or "
            "--use-checkpoint-opt_param-scheduler or --override-opt_param-scheduler to say which counts"
        )
