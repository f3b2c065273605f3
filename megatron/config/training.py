"""The training loop: batch sizes, length, evaluation, logging, loss scaling."""

from __future__ import annotations

import dataclasses
import math
import re

from megatron.config.batch_ramp import BatchSizes, batch_sizes
from megatron.config.flags import REQUIRED, FlagGroup, flag, on_off

EXIT_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
LOG_LEVELS = ("debug", "info", "warning", "error")
MOST_SEED = 1 << 31


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(FlagGroup):
    """Training: batch sizes, length, evaluation, logging."""

    micro_batch_size: int = flag(REQUIRED, "samples per rank in one forward pass", least=1)
    global_batch_size: int = flag(None, "samples per iteration over all ranks (default: micro batch x DP)", least=1)
    rampup_batch_size: tuple[int, ...] = flag(
        (),
        "START INCREMENT SAMPLES: the global batch grows from START to --global-batch-size in steps of INCREMENT, over "
        "SAMPLES samples; needs --train-samples",
    )
    train_iters: int = flag(
        None, "iterations to train for, over all restarts (default: derived from --train-samples)", least=1
    )
    train_samples: int | None = flag(
        None,
        "samples to train on, over all restarts, instead of --train-iters; an incomplete last batch is dropped",
        least=1,
    )
    train_tokens: int | None = flag(
        None, "stop, and save, after so many tokens; --train-iters or --train-samples may stop the run earlier", least=1
    )
    seed: int = flag(1234, "seed of initialization, dropout and data order", least=1)
    deterministic: bool | None = flag(
        None,
        "the same numbers from the same state on the same layout, to the last bit: settings of torch, cuBLAS, NCCL and "
        "attention, which cost time; on or off (default: off)",
        parse=on_off,
    )
    torch_compile: bool = flag(
        False,
        "compile transformer layers with torch.compile, as phase compile of the start-up; a host keeps the result in "
        "TORCHINDUCTOR_CACHE_DIR for its next start (default: in TMPDIR; set it where each job has its own); without "
        "dropout only",
    )
    data_parallel_random_init: bool = flag(
        False, "seed each DP rank differently (by 10 x its rank); DeepSpeed still broadcasts the weights of rank 0"
    )
    log_interval: int = flag(100, "iterations between log lines", least=1)
    log_level: str = flag("info", "lowest severity that is logged", choices=LOG_LEVELS)
    exit_interval: int | None = flag(None, "stop, and save, when the iteration is divisible by this", least=1)
    exit_duration_in_mins: float | None = flag(
        None, "stop, and save, when this many minutes have passed since the start of the process", above=0
    )
    exit_signal_handler: bool = flag(False, "on SIGTERM, or the signals of --exit-signal, save a checkpoint and stop")
    exit_signal: tuple[str, ...] = flag(
        (),
        "the signals of --exit-signal-handler, of SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 (default: SIGTERM); "
        "restart-launch passes them on; ranks of torchrun and deepspeed save when one has ended their launcher",
        needs="exit_signal_handler",
    )
    allow_injected_faults: bool = flag(
        False,
        "for the restart drill: SIGRTMIN+1 raises an exception in this process, SIGRTMIN+2 a device error, and "
        "SIGRTMIN+4 holds it in its next return until the signal comes again",
    )
    eval_interval: int = flag(1000, "iterations between evaluations; 0: none while training", least=0)
    eval_iters: int = flag(100, "batches of one evaluation; 0: no evaluation", least=0)
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "accumulate and reduce gradients in fp32; always so with --bf16 and ZeRO-1"
    )
    loss_scale: float | None = flag(None, "static loss scale of --fp16 (default: dynamic)", above=0)
    initial_loss_scale: float = flag(2.0**16, "first dynamic loss scale of --fp16, a power of two", above=0)
    min_loss_scale: float = flag(1.0, "smallest dynamic loss scale of --fp16", least=1)
    loss_scale_window: float = flag(1000.0, "iterations without overflow after which the loss scale doubles", least=1)
    hysteresis: int = flag(2, "overflows after which the loss scale is halved", least=1)
    tensorboard_dir: str | None = flag(None, "directory for TensorBoard event files (default: none written)")
    tensorboard_log_interval: int = flag(1, "iterations between TensorBoard points", least=1)
    tensorboard_queue_size: int = flag(1000, "TensorBoard points held before they are flushed", least=1)
    log_params_norm: bool = flag(False, "log the L2 norm of all parameters, each counted once")
    log_num_zeros_in_grad: bool = flag(
        False, "log how many elements of the reduced gradient are zero, each parameter counted once"
    )
    log_timers_to_tensorboard: bool = flag(
        False, "write the time per iteration to TensorBoard", needs="tensorboard_dir"
    )
    log_batch_size_to_tensorboard: bool = flag(False, "write the batch size to TensorBoard", needs="tensorboard_dir")
    log_learning_rate_to_tensorboard: bool = flag(
        True,
        "no learning rate in TensorBoard",
        names=("--no-log-learnig-rate-to-tensorboard", "--no-log-learning-rate-to-tensorboard"),
    )
    log_loss_scale_to_tensorboard: bool = flag(
        True, "no loss scale in TensorBoard", names=("--no-log-loss-scale-to-tensorboard",)
    )
    log_validation_ppl_to_tensorboard: bool = flag(
        False, "write the validation perplexity to TensorBoard", needs="tensorboard_dir"
    )
    log_memory_to_tensorboard: bool = flag(False, "write accelerator memory to TensorBoard", needs="tensorboard_dir")
    log_world_size_to_tensorboard: bool = flag(False, "write the world size to TensorBoard", needs="tensorboard_dir")
    log_optimizer_states_to_tensorboard: bool = flag(
        False,
        "write norms and largest elements of Adam's moments and of the master weights to TensorBoard",
        needs="tensorboard_dir",
    )
    profile: str | None = flag(
        None,
        "record some steps with torch.profiler: pt, or pt-full with call stacks; a file of each rank in "
        "--tensorboard-dir, or in the directory of the restart trace if there is none",
        choices=("pt", "pt-full"),
    )
    profile_steps: str | None = flag(
        None,
        "FIRST,LAST of the steps that --profile records, counted from 1 at the start of each launch (default: 2,3)",
        names=("--profile_steps", "--profile-steps"),
        needs="profile",
    )
    profile_ranks: tuple[int, ...] = flag((), "ranks that --profile records (default: all)", needs="profile")
    data_parallel_size: int = 1  # copied here by Config, for num_micro_batches

    def __post_init__(self) -> None:
        for name in ("rampup_batch_size", "exit_signal", "profile_ranks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self.check_values()
        if self.seed > MOST_SEED:
            why = f"ranks add their places to it, and NumPy takes seeds below 2^32; give at most {MOST_SEED}"
            self.refuse("seed", why)
        self._check_exit_signals()
        self._check_profile()
        step = self.micro_batch_size * self.data_parallel_size
        if self.global_batch_size is not None and self.global_batch_size % step:
            self.refuse(
                "global_batch_size",
                f"not divisible by --micro-batch-size {self.micro_batch_size} x data-parallel size "
                f"{self.data_parallel_size} = {step}; use a multiple of {step}",
            )
        if not math.log2(self.initial_loss_scale).is_integer() or self.initial_loss_scale < 1:
            self.refuse("initial_loss_scale", "must be a power of two, at least 1")
        for name in ("min_loss_scale", "loss_scale_window"):
            if not float(getattr(self, name)).is_integer():
                self.refuse(name, "DeepSpeed takes a whole number")

    @property
    def stops_at(self) -> tuple[str, ...]:
        """Names of the signals at which the run saves and stops."""
        return (self.exit_signal or ("SIGTERM",)) if self.exit_signal_handler else ()

    def _check_exit_signals(self) -> None:
        unknown = [name for name in self.exit_signal if name not in EXIT_SIGNALS]
        if unknown:
            self.refuse("exit_signal", f"{unknown[0]} is none of {', '.join(EXIT_SIGNALS)}")

    def _check_profile(self) -> None:
        if not re.fullmatch(r"\d+,\d+", self.profile_steps or "2,3") or not 1 <= self.profiled[0] <= self.profiled[1]:
            self.refuse("profile_steps", "give the first and the last step, counted from 1, as 2,3")

    @property
    def profiled(self) -> tuple[int, int]:
        """The first and the last step that --profile records."""
        first, last = map(int, (self.profile_steps or "2,3").split(","))
        return first, last

    @property
    def batch_sizes(self) -> BatchSizes:
        """Global batch size by consumed samples; valid inside a Config. Raises ConfigError."""
        step = self.micro_batch_size * self.data_parallel_size
        return batch_sizes(self.rampup_batch_size, self.global_batch_size, step)

    @property
    def needed_samples(self) -> tuple[int, int, int]:
        """(train, valid, test) samples that a run reads from its first iteration to its last; valid inside a Config."""
        return samples_of_run(
            self.train_iters, self.eval_interval, self.eval_iters, self.global_batch_size, self.train_samples
        )

    @property
    def num_micro_batches(self) -> int:
        """Micro batches that each data-parallel rank runs per iteration, after a ramp; valid inside a Config."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)


def samples_of_run(
    train_iters: int, eval_interval: int, eval_iters: int, global_batch_size: int, train_samples: int | None = None
) -> tuple[int, int, int]:
    """(train, valid, test) samples that a run of this length reads, as upstream counts them."""
    evaluations = train_iters // eval_interval + 1 if eval_interval else 1
    batches = (train_iters, evaluations * eval_iters, eval_iters)
    train = train_samples or batches[0] * global_batch_size
    return train, batches[1] * global_batch_size, batches[2] * global_batch_size
