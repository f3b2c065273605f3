"""The output of training: lines per iteration, and TensorBoard."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from megatron.checkpointing.state.collect import Progress
from megatron.config import Config
from megatron.model.flops import flops_of_batch
from megatron.parallel.accelerator import accelerator
from megatron.processes.in_process_restart import at_return
from megatron.processes.telling import tell
from megatron.training.statistics import Statistics


class TrainingLog:
    """The iteration line in upstream's form, printed by the last rank, and its TensorBoard points."""

    def __init__(self, config: Config, padded_vocab_size: int) -> None:
        self._config = config
        self._flops_per_sample = flops_of_batch(config, padded_vocab_size, 1)
        self._is_printer = config.parallel.rank == config.parallel.world_size - 1
        self._seconds = 0.0
        self._samples = 0
        self._losses: list[float] = []
        self._skipped = self._nan = 0
        self._writer: Any = None
        if self._is_printer and config.training.tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter  # slow, so imported only if needed

            self._writer = SummaryWriter(
                config.training.tensorboard_dir, max_queue=config.training.tensorboard_queue_size
            )
            at_return(self.close)

    def iteration(
        self, engine: Any, progress: Progress, loss: float, seconds: float, skipped: bool, statistics: Statistics
    ) -> None:
        """Add one iteration; print the line if it is due by --log-interval."""
        self._seconds += seconds
        self._samples += engine.train_batch_size()
        self._skipped += skipped
        if math.isfinite(loss):
            self._losses.append(loss)
        else:
            self._nan += 1
        self._tensorboard(engine, progress, loss, seconds, statistics)
        if progress.iteration % self._config.training.log_interval:
            return
        if self._is_printer:
            tell(self._line(engine, progress, statistics), sys.stdout)
        self._seconds, self._samples, self._losses, self._skipped, self._nan = 0.0, 0, [], 0, 0

    def _line(self, engine: Any, progress: Progress, statistics: Statistics) -> str:
        training, model, parallel = self._config.training, self._config.model, self._config.parallel
        iterations = len(self._losses) + self._nan
        seconds = self._seconds / iterations
        samples = self._samples / self._seconds
        tokens = progress.consumed_train_samples * model.seq_length
        parts = [
            f" iteration {progress.iteration:8d}/{training.train_iters:8d}",
            f"consumed samples: {progress.consumed_train_samples:12d}",
            f"consumed tokens: {tokens:12d}",
            f"elapsed time per iteration (ms): {seconds * 1e3:.1f}",
            f"learning rate: {engine.get_lr()[0]:.3E}",
            f"global batch size: {engine.train_batch_size():5d}",
        ]
        if self._losses:
            parts.append(f"lm loss: {sum(self._losses) / len(self._losses):.6E}")
        if statistics.moe_loss is not None:
            parts.append(f"moe loss: {statistics.moe_loss:.6E}")
        if model.params_dtype == "fp16":
            parts.append(f"loss scale: {engine.optimizer.loss_scale:.1f}")
        grad_norm = engine.get_global_grad_norm()
        if grad_norm is not None:
            parts.append(f"grad norm: {float(grad_norm):.3f}")
        if statistics.zeros_in_grad is not None:
            parts.append(f"num zeros: {statistics.zeros_in_grad:.1f}")
        if statistics.params_norm is not None:
            parts.append(f"params norm: {statistics.params_norm:.3f}")
        parts += [
            f"actual seqlen: {model.seq_length:5d}",
            f"number of skipped iterations: {self._skipped:3d}",
            f"number of nan iterations: {self._nan:3d}",
            f"samples per second: {samples:.3f}",
            f"tokens per gpu per second (tgs): {samples * model.seq_length / parallel.world_size:.3f}",
            f"TFLOPs: {self._flops_per_sample * samples / parallel.world_size / 1e12:.2f}",
        ]
        return " | ".join(parts) + " |"

    def _tensorboard(
        self, engine: Any, progress: Progress, loss: float, seconds: float, statistics: Statistics
    ) -> None:
        training = self._config.training
        if self._writer is None or progress.iteration % training.tensorboard_log_interval:
            return
        points: dict[str, float] = {"lm-loss-training/lm loss": loss}
        fp16 = self._config.model.params_dtype == "fp16"
        for name, wanted, value in (
            ("learning-rate", training.log_learning_rate_to_tensorboard, engine.get_lr()[0]),
            ("batch-size", training.log_batch_size_to_tensorboard, engine.train_batch_size()),
            ("loss-scale", training.log_loss_scale_to_tensorboard, engine.optimizer.loss_scale if fp16 else None),
            ("world-size", training.log_world_size_to_tensorboard, self._config.parallel.world_size),
            ("iteration-time", training.log_timers_to_tensorboard, seconds),
            ("grad-norm", True, engine.get_global_grad_norm()),
            ("num-zeros", True, statistics.zeros_in_grad),
            ("params-norm", True, statistics.params_norm),
        ):
            if wanted and value is not None:
                points[f"{name}/{name}"] = float(value)
        if statistics.moe_loss is not None:
            points["lm-loss-training/moe loss"] = statistics.moe_loss
        points |= statistics.optimizer_states
        self._write(points, progress)
        if training.log_memory_to_tensorboard:
            for name, value in _accelerator_memory().items():
                self._writer.add_scalar(name, value, progress.iteration)

    def _write(self, points: Mapping[str, float], progress: Progress) -> None:
        """Write each point three times, as upstream: over iterations, samples and tokens."""
        samples = progress.consumed_train_samples
        axes = {"": progress.iteration, " vs samples": samples, " vs tokens": samples * self._config.model.seq_length}
        for name, value in points.items():
            for axis, position in axes.items():
                self._writer.add_scalar(name + axis, value, position)

    def evaluation(self, loss: float, progress: Progress, split: str) -> None:
        """Print the result of an evaluation."""
        prefix = f"iteration {progress.iteration}"
        perplexity = math.exp(min(20.0, loss))
        if self._is_printer:
            line = f" {split} loss at {prefix} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} | "
            tell("\n".join(("-" * len(line), line, "-" * len(line))), sys.stdout)
        if self._writer is not None:
            points = {f"lm-loss-validation/lm loss {split}": loss}
            if self._config.training.log_validation_ppl_to_tensorboard:
                points[f"lm-loss-validation/lm loss {split} ppl"] = perplexity
            self._write(points, progress)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _accelerator_memory() -> dict[str, float]:
    return {
        "mem-reserved-bytes": accelerator().memory_reserved(),
        "mem-allocated-bytes": accelerator().memory_allocated(),
        "mem-max-allocated-bytes": accelerator().max_memory_allocated(),
    }
