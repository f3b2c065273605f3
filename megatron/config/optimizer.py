"""The optimizer and its learning-rate and weight-decay schedules."""

from __future__ import annotations

import dataclasses

from megatron.config.errors import ConfigError, refuse, require_at_least, require_one_of, require_positive
from megatron.config.flags import REQUIRED, flag, flag_name

OPTIMIZERS = ("adam", "sgd")
LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
WEIGHT_DECAY_INCR_STYLES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and schedules."""

    optimizer: str = flag("adam", "optimizer", choices=OPTIMIZERS)
    lr: float = flag(REQUIRED, "peak learning rate")
    min_lr: float = flag(0.0, "learning rate at the end of the decay")
    lr_decay_style: str = flag("linear", "shape of the decay", choices=LR_DECAY_STYLES)
    lr_decay_iters: int = flag(None, "iterations after which --min-lr is reached (default: --train-iters)")
    lr_decay_samples: int | None = flag(
        None, "samples after which --min-lr is reached, with --train-samples (default: --train-samples)"
    )
    lr_decay_tokens: int | None = flag(
        None, "tokens after which --min-lr is reached, instead of iterations or samples"
    )
    lr_warmup_iters: int = flag(0, "iterations of linear warm-up from zero")
    lr_warmup_samples: int = flag(0, "samples of linear warm-up from zero, with --train-samples")
    lr_warmup_tokens: int | None = flag(
        None, "tokens of linear warm-up from zero, instead of iterations or samples"
    )
    lr_warmup_fraction: float | None = flag(
        None, "warm-up as a fraction of the decay, instead of --lr-warmup-iters or --lr-warmup-samples"
    )
    weight_decay: float = flag(0.01, "weight decay")
    start_weight_decay: float = flag(None, "weight decay at the start, with --weight-decay-incr-style")
    end_weight_decay: float = flag(None, "weight decay at the end, with --weight-decay-incr-style")
    weight_decay_incr_style: str = flag(
        "constant", "how weight decay grows from start to end", choices=WEIGHT_DECAY_INCR_STYLES
    )
    clip_grad: float = flag(1.0, "largest L2 norm of the gradients of all ranks; 0: no clipping")
    adam_beta1: float = flag(0.9, "decay of Adam's first moment")
    adam_beta2: float = flag(0.999, "decay of Adam's second moment")
    adam_eps: float = flag(1e-8, "epsilon of Adam")
    sgd_momentum: float = flag(0.9, "momentum of SGD")
    override_opt_param_scheduler: bool = flag(
        False,
        "on resume, take the schedule from the command line, not from the checkpoint",
        names=("--override-opt_param-scheduler", "--override-opt-param-scheduler"),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "on resume, take the schedule from the checkpoint, not from the command line",
        names=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"),
    )

    def __post_init__(self) -> None:
        require_one_of("--optimizer", self.optimizer, OPTIMIZERS)
        require_one_of("--lr-decay-style", self.lr_decay_style, LR_DECAY_STYLES)
        require_at_least("--clip-grad", self.clip_grad, 0)
        require_positive("--adam-eps", self.adam_eps)
        for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                refuse(flag_name(name), value, "must be in [0, 1)")
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ConfigError(
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict each "
                "other: give one of them"
            )
        self._check_lr()
        self._check_weight_decay()

    @property
    def warmup_iters(self) -> float:
        """Length of the warm-up in iterations (upstream allows a fractional one); valid inside a Config."""
        if self.lr_warmup_fraction is not None:
            return self.lr_warmup_fraction * self.lr_decay_iters
        return self.lr_warmup_iters

    def _check_lr(self) -> None:
        require_positive("--lr", self.lr)
        require_at_least("--min-lr", self.min_lr, 0)
        if self.min_lr > self.lr:
            refuse("--min-lr", self.min_lr, f"is above --lr {self.lr}; lower it")
        require_at_least("--lr-decay-iters", self.lr_decay_iters, 1)
        require_at_least("--lr-decay-samples", self.lr_decay_samples, 1)
        require_at_least("--lr-decay-tokens", self.lr_decay_tokens, 1)
        require_at_least("--lr-warmup-iters", self.lr_warmup_iters, 0)
        require_at_least("--lr-warmup-samples", self.lr_warmup_samples, 0)
        require_at_least("--lr-warmup-tokens", self.lr_warmup_tokens, 0)
        self._check_lr_tokens()
        if self.lr_warmup_fraction is not None:
            if self.lr_warmup_samples:
                raise ConfigError(
                    f"--lr-warmup-samples {self.lr_warmup_samples} and --lr-warmup-fraction "
                    f"{self.lr_warmup_fraction} both set the warm-up: give one of them"
                )
            if self.lr_warmup_iters:
                raise ConfigError(
                    f"--lr-warmup-iters {self.lr_warmup_iters} and --lr-warmup-fraction "
                    f"{self.lr_warmup_fraction} both set the warm-up: give one of them"
                )
            if not 0.0 <= self.lr_warmup_fraction < 1.0:
                refuse("--lr-warmup-fraction", self.lr_warmup_fraction, "must be in [0, 1)")
        if self.lr_decay_iters is not None and self.warmup_iters >= self.lr_decay_iters:
            refuse(
                "--lr-warmup-iters",
                self.warmup_iters,
                f"must be less than the {self.lr_decay_iters} iterations of the decay (--lr-decay-iters, by "
                "default --train-iters); shorten the warm-up or lengthen the decay",
            )

    def _check_lr_tokens(self) -> None:
        if self.lr_warmup_tokens is None:
            return
        for name in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"):
            if getattr(self, name):
                refuse(
                    flag_name(name),
                    getattr(self, name),
                    "--lr-warmup-tokens sets the warm-up, too; give one of them",
                )
        if self.lr_decay_tokens is None:
            # Upstream then decays by samples from a warm-up it never counted in them.
            refuse("--lr-warmup-tokens", self.lr_warmup_tokens, "needs --lr-decay-tokens beside it")
        if self.lr_warmup_tokens >= self.lr_decay_tokens:
            refuse(
                "--lr-warmup-tokens",
                self.lr_warmup_tokens,
                f"must be less than --lr-decay-tokens {self.lr_decay_tokens}",
            )

    def _check_weight_decay(self) -> None:
        require_at_least("--weight-decay", self.weight_decay, 0)
        require_one_of("--weight-decay-incr-style", self.weight_decay_incr_style, WEIGHT_DECAY_INCR_STYLES)
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            for name, value in (("--start-weight-decay", start), ("--end-weight-decay", end)):
                # A filled-in value may come back here through dataclasses.replace.
                if value is not None and value != self.weight_decay:
                    refuse(
                        name, value, "add --weight-decay-incr-style linear or cosine, or use --weight-decay"
                    )
            object.__setattr__(self, "start_weight_decay", self.weight_decay)
            object.__setattr__(self, "end_weight_decay", self.weight_decay)
        elif start is None or end is None:
            refuse(
                "--weight-decay-incr-style",
                self.weight_decay_incr_style,
                "give --start-weight-decay and --end-weight-decay",
            )
        elif not 0.0 <= start <= end:
            refuse("--start-weight-decay", start, f"must be at least 0 and at most --end-weight-decay {end}")
