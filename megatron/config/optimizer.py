"""The optimizer and its learning-rate and weight-decay schedules."""

from __future__ import annotations

import dataclasses

from megatron.config.errors import ConfigError, refuse
from megatron.config.flags import REQUIRED, FlagGroup, flag, flag_name

OPTIMIZERS = ("adam", "sgd")
LR_DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root")
WEIGHT_DECAY_INCR_STYLES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(FlagGroup):
    """Optimizer and schedules."""

    optimizer: str = flag("adam", "optimizer", choices=OPTIMIZERS)
    lr: float = flag(REQUIRED, "peak learning rate", above=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", least=0)
    lr_decay_style: str = flag("linear", "shape of the decay", choices=LR_DECAY_STYLES)
    lr_decay_iters: int = flag(None, "iterations after which --min-lr is reached (default: --train-iters)", least=1)
    lr_decay_samples: int | None = flag(
        None, "samples after which --min-lr is reached, with --train-samples (default: --train-samples)", least=1
    )
    lr_decay_tokens: int | None = flag(
        None, "tokens after which --min-lr is reached, instead of iterations or samples", least=1
    )
    lr_warmup_iters: int = flag(0, "iterations of linear warm-up from zero", least=0)
    lr_warmup_samples: int = flag(0, "samples of linear warm-up from zero, with --train-samples", least=0)
    lr_warmup_tokens: int | None = flag(
        None, "tokens of linear warm-up from zero, instead of iterations or samples", least=0
    )
    lr_warmup_fraction: float | None = flag(
        None, "warm-up as a fraction of the decay, instead of --lr-warmup-iters or --lr-warmup-samples", below=1
    )
    weight_decay: float = flag(0.01, "weight decay", least=0)
    start_weight_decay: float = flag(None, "weight decay at the start, with --weight-decay-incr-style")
    end_weight_decay: float = flag(None, "weight decay at the end, with --weight-decay-incr-style")
    weight_decay_incr_style: str = flag(
        "constant", "how weight decay grows from start to end", choices=WEIGHT_DECAY_INCR_STYLES
    )
    clip_grad: float = flag(1.0, "largest L2 norm of the gradients of all ranks; 0: no clipping", least=0)
    adam_beta1: float = flag(0.9, "decay of Adam's first moment", below=1)
    adam_beta2: float = flag(0.999, "decay of Adam's second moment", below=1)
    adam_eps: float = flag(1e-8, "epsilon of Adam", above=0)
    cpu_optimizer: bool = flag(
        False,
        "keep master weights and moments in host memory, where a processor updates them (DeepSpeed's ZeRO-Offload); "
        "with --optimizer adam",
    )
    sgd_momentum: float = flag(0.9, "momentum of SGD", below=1)
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
        self.check_values()
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            raise ConfigError(
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict each "
                "other: give one of them"
            )
        if self.cpu_optimizer and self.optimizer != "adam":
            self.refuse("optimizer", "--cpu-optimizer is for adam; drop one of the flags")
        self._check_lr()
        self._check_weight_decay()

    @property
    def warmup_iters(self) -> float:
        """Length of the warm-up in iterations (upstream allows a fractional one); valid inside a Config."""
        if self.lr_warmup_fraction is not None:
            return self.lr_warmup_fraction * self.lr_decay_iters
        return self.lr_warmup_iters

    def _check_lr(self) -> None:
        if self.min_lr > self.lr:
            self.refuse("min_lr", f"is above --lr {self.lr}; lower it")
        self._check_lr_tokens()
        if self.lr_warmup_fraction is not None:
            for name in ("lr_warmup_samples", "lr_warmup_iters"):
                if getattr(self, name):
                    raise ConfigError(
                        f"{flag_name(name)} {getattr(self, name)} and --lr-warmup-fraction "
                        f"{self.lr_warmup_fraction} both set the warm-up: give one of them"
                    )
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
                self.refuse(name, "--lr-warmup-tokens sets the warm-up, too; give one of them")
        if self.lr_decay_tokens is None:
            # Upstream then decays by samples from a warm-up it never counted in them.
            self.refuse("lr_warmup_tokens", "needs --lr-decay-tokens beside it")
        if self.lr_warmup_tokens >= self.lr_decay_tokens:
            self.refuse("lr_warmup_tokens", f"must be less than --lr-decay-tokens {self.lr_decay_tokens}")

    def _check_weight_decay(self) -> None:
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            for name in ("start_weight_decay", "end_weight_decay"):
                # A filled-in value may come back here through dataclasses.replace.
                if getattr(self, name) not in (None, self.weight_decay):
                    self.refuse(name, "add --weight-decay-incr-style linear or cosine, or use --weight-decay")
                object.__setattr__(self, name, self.weight_decay)
        elif start is None or end is None:
            self.refuse("weight_decay_incr_style", "give --start-weight-decay and --end-weight-decay")
        elif not 0.0 <= start <= end:
            why = f"must be at least 0 and at most --end-weight-decay {end}"
            self.refuse("start_weight_decay", why)
