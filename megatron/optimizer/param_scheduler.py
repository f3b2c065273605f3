"""Learning-rate and weight-decay schedules, counted in samples; state compatible with upstream's."""

from __future__ import annotations

import logging
import math
from typing import Any

from megatron.config import ConfigError, OptimizerConfig

_STATE_NAMES = (
    "max_lr", "lr_warmup_steps", "lr_warmup_tokens", "num_steps", "num_tokens", "lr_decay_style",
    "lr_decay_steps", "lr_decay_tokens", "min_lr", "start_wd", "end_wd", "wd_incr_style", "wd_incr_steps",
)  # fmt: skip
_PROGRESS = ("num_steps", "num_tokens")
_SET_BY = {
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

logger = logging.getLogger(__name__)


class OptimizerParamScheduler:
    """Sets `lr` and `weight_decay` of every parameter group before each iteration.

    "Steps" are samples, so that a schedule does not depend on the global batch size: --lr-decay-iters and
    --lr-warmup-iters times the global batch. Decay styles: constant, linear, cosine, inverse-square-root.
    """

    def __init__(
        self,
        optimizer: Any,
        config: OptimizerConfig,
        *,
        train_iters: int,
        global_batch_size: int,
        seq_length: int,
    ) -> None:
        self.optimizer = optimizer
        self.increment = global_batch_size
        self.seq_length = seq_length
        decay_iters = config.lr_decay_iters or train_iters
        warmup_iters: float = config.lr_warmup_iters
        if config.lr_warmup_fraction is not None:
            warmup_iters = config.lr_warmup_fraction * decay_iters
        self.max_lr = float(config.lr)
        self.min_lr = config.min_lr
        self.lr_warmup_steps = warmup_iters * global_batch_size
        self.lr_decay_steps = decay_iters * global_batch_size
        self.lr_decay_style = config.lr_decay_style
        self.lr_warmup_tokens = None
        self.lr_decay_tokens = None
        self.start_wd = config.start_weight_decay
        self.end_wd = config.end_weight_decay
        self.wd_incr_style = config.weight_decay_incr_style
        self.wd_incr_steps = train_iters * global_batch_size
        self.num_steps = 0
        self.num_tokens = 0
        self._override = config.override_opt_param_scheduler
        self._use_checkpoint = config.use_checkpoint_opt_param_scheduler
        self.step(0)

    def get_lr(self) -> float:
        """Learning rate at `num_steps` samples: linear warm-up, then the decay style down to min_lr."""
        if self.lr_warmup_steps > 0 and self.num_steps <= self.lr_warmup_steps:
            return self.max_lr * self.num_steps / self.lr_warmup_steps
        if self.lr_decay_style == "constant":
            return self.max_lr
        if self.num_steps > self.lr_decay_steps:
            return self.min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(
                self.min_lr, self.max_lr * math.sqrt(max(self.lr_warmup_steps, 1) / max(self.num_steps, 1))
            )
        done = (self.num_steps - self.lr_warmup_steps) / (self.lr_decay_steps - self.lr_warmup_steps)
        left = 1.0 - done if self.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.min_lr + left * (self.max_lr - self.min_lr)

    def get_wd(self) -> float:
        """Weight decay at `num_steps` samples: constant, or rising from start to end."""
        if self.wd_incr_style == "constant" or self.num_steps > self.wd_incr_steps:
            return self.end_wd
        done = self.num_steps / self.wd_incr_steps
        risen = done if self.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1 - done)) + 1.0)
        return self.start_wd + risen * (self.end_wd - self.start_wd)

    def step(self, increment: int | None = None) -> None:
        """Advance by `increment` samples; by a global batch if None, as DeepSpeed calls it."""
        samples = self.increment if increment is None else increment
        self.num_steps += samples
        # upstream counts the tokens of finished iterations, so this trails num_steps by one batch
        self.num_tokens = max(0, self.num_steps - self.increment) * self.seq_length
        lr, wd = self.get_lr(), self.get_wd()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = wd * group.get("wd_mult", 1.0)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _has_no_effect(self, name: str) -> bool:
        """Whether a setting does not matter to this schedule, such as the length of a decay that is none."""
        constant_lr = self.lr_decay_style == "constant" and name in ("lr_decay_steps", "min_lr")
        return constant_lr or (self.wd_incr_style == "constant" and name == "wd_incr_steps")

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE_NAMES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore progress, and the schedule itself unless the command line is to override it.

        Raises ConfigError where checkpoint and command line disagree and no flag says which counts.
        """
        self._tell_of_changes(state)
        for name in _STATE_NAMES:
            if name in _PROGRESS or name not in state or self._override:
                continue
            mine, theirs = getattr(self, name), state[name]
            if self._has_no_effect(name):
                continue
            if mine != theirs and not self._use_checkpoint:
                raise ConfigError(
                    f"learning-rate schedule: {name} is {theirs} in the checkpoint and {mine} here "
                    f"({_SET_BY.get(name, 'in tokens, as upstream counts')}); give the same schedule, or "
                    "--use-checkpoint-opt_param-scheduler or --override-opt_param-scheduler to say which counts"
                )
            setattr(self, name, theirs)
        self.num_steps = 0
        self.step(state["num_steps"])

    def _tell_of_changes(self, state: dict[str, Any]) -> None:
        """Log what one of the two flags settles."""
        for name, flags in _SET_BY.items():
            mine, theirs = getattr(self, name), state.get(name)
            if name not in state or mine == theirs or self._has_no_effect(name):
                continue
            if self._override:
                logger.info("--override-opt_param-scheduler: %s %s -> %s (%s)", name, theirs, mine, flags)
            elif self._use_checkpoint:
                told = "--use-checkpoint-opt_param-scheduler: %s stays %s, not %s (%s)"
                logger.info(told, name, theirs, mine, flags)
