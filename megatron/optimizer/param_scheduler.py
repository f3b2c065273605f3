"""Learning-rate and weight-decay schedules, counted in samples; state compatible with upstream's."""

from __future__ import annotations

import logging
import math
from typing import Any

from megatron.config import OptimizerConfig, TrainingConfig
from megatron.config.schedule import SET_BY, check_same_schedule, has_no_effect, schedule_settings

_PROGRESS = ("num_steps", "num_tokens")

logger = logging.getLogger(__name__)


class OptimizerParamScheduler:
    """Sets `lr` and `weight_decay` of every parameter group before each iteration.

    "Steps" are samples, so that a schedule does not depend on the global batch size: --lr-decay-iters and
    --lr-warmup-iters times the global batch, or --lr-decay-samples and --lr-warmup-samples. With --lr-decay-tokens
    the decay counts tokens, with --lr-warmup-tokens the warm-up, too: those of all iterations before, whether their
    step was skipped or not, as upstream. Decay styles: constant, linear, cosine, inverse-square-root.
    """

    max_lr: float
    lr_warmup_steps: float
    lr_warmup_tokens: int | None
    lr_decay_style: str
    lr_decay_steps: int
    lr_decay_tokens: int | None
    min_lr: float
    start_wd: float
    end_wd: float
    wd_incr_style: str
    wd_incr_steps: int

    def __init__(self, optimizer: Any, config: OptimizerConfig, training: TrainingConfig, seq_length: int) -> None:
        self.optimizer = optimizer
        self.increment = training.global_batch_size
        self.seq_length = seq_length
        settings = schedule_settings(config, training)
        self._names = tuple(settings)
        for name, value in settings.items():
            setattr(self, name, value)
        self.num_steps = 0
        self.num_tokens = 0
        self._tokens_before: int | None = None
        self._override = config.override_opt_param_scheduler
        self._use_checkpoint = config.use_checkpoint_opt_param_scheduler
        self.step(0)

    def begin_iteration(self, batch_size: int, consumed_samples: int) -> None:
        """Announce the next iteration: its samples, and those of all iterations before it."""
        self.increment = batch_size
        self._tokens_before = consumed_samples * self.seq_length

    def get_lr(self) -> float:
        """Learning rate now: linear warm-up, then the decay style down to min_lr."""
        if self.lr_decay_tokens is not None and self.num_steps >= self.lr_warmup_steps:
            self._tokens_at_end_of_warmup()
        at, warmup = self._warmup_position()
        if warmup > 0 and at <= warmup:
            return self.max_lr * at / warmup
        if self.lr_decay_style == "constant":
            return self.max_lr
        decay: float = self.lr_decay_steps
        if self.lr_decay_tokens is not None:
            at, warmup, decay = self.num_tokens, self._tokens_at_end_of_warmup(), self.lr_decay_tokens
        if at > decay:
            return self.min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(warmup, 1) / max(at, 1)))
        done = (at - warmup) / (decay - warmup)
        left = 1.0 - done if self.lr_decay_style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.min_lr + left * (self.max_lr - self.min_lr)

    def _warmup_position(self) -> tuple[float, float]:
        """(position of training, end of the warm-up), both in tokens or both in samples."""
        if self.lr_warmup_tokens is not None and not self.lr_warmup_steps > 0:
            return self.num_tokens, self.lr_warmup_tokens
        return self.num_steps, self.lr_warmup_steps

    def _tokens_at_end_of_warmup(self) -> int:
        """Tokens when a warm-up counted in samples was over; noted once, since a decay in tokens begins there."""
        if self.lr_warmup_tokens is None:
            over = max(0, self.num_steps - self.increment) * self.seq_length
            first = max(0, math.ceil(self.lr_warmup_steps) - self.increment) * self.seq_length
            self.lr_warmup_tokens = min(over, first)
        return self.lr_warmup_tokens

    def get_wd(self) -> float:
        """Weight decay at `num_steps` samples: constant, or rising from start to end."""
        if self.wd_incr_style == "constant" or self.num_steps > self.wd_incr_steps:
            return self.end_wd
        done = self.num_steps / self.wd_incr_steps
        risen = done if self.wd_incr_style == "linear" else 0.5 * (math.cos(math.pi * (1 - done)) + 1.0)
        return self.start_wd + risen * (self.end_wd - self.start_wd)

    def step(self, increment: int | None = None, tokens: int | None = None) -> None:
        """Advance by `increment` samples; by a batch if None, as DeepSpeed calls it. `tokens`: consumed in all."""
        samples = self.increment if increment is None else increment
        self.num_steps += samples
        if tokens is None and increment is None:
            tokens = self._tokens_before
        # upstream counts the tokens of finished iterations, so this trails num_steps by one batch
        trailing = max(0, self.num_steps - self.increment) * self.seq_length
        self.num_tokens = trailing if tokens is None else tokens
        lr, wd = self.get_lr(), self.get_wd()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = wd * group.get("wd_mult", 1.0)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def state_dict(self) -> dict[str, Any]:
        return self._settings() | {name: getattr(self, name) for name in _PROGRESS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore progress, and the schedule itself unless the command line is to override it.

        Raises ConfigError where checkpoint and command line disagree and no flag says which counts.
        """
        self._tell_of_changes(state)
        mine = self._settings()
        if not self._override:
            if not self._use_checkpoint:
                check_same_schedule(mine, state)
            for name in self._names:
                # What has no effect here may have one in the checkpoint's schedule, if that counts.
                if name in state and (self._use_checkpoint or not has_no_effect(mine, name)):
                    setattr(self, name, state[name])
        self.num_steps = 0
        self.step(state["num_steps"], state.get("num_tokens"))

    def _tell_of_changes(self, state: dict[str, Any]) -> None:
        """Log what one of the two flags decides."""
        settings = self._settings()
        for name, flags in SET_BY.items():
            mine, theirs = getattr(self, name), state.get(name)
            if name not in state or mine == theirs or has_no_effect(settings, name):
                continue
            if self._override:
                logger.info("--override-opt_param-scheduler: %s %s -> %s (%s)", name, theirs, mine, flags)
            elif self._use_checkpoint:
                message = "--use-checkpoint-opt_param-scheduler: %s stays %s, not %s (%s)"
                logger.info(message, name, theirs, mine, flags)
