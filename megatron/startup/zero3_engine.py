"""DeepSpeed's engine of ZeRO stage 3, with the methods of its PipelineEngine that training uses.

Its PipelineEngine knows no stage 3. The model is the same PipelineModule, whose one stage this engine runs as any other
module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron.config import Config
from megatron.config.deepspeed_config import build_deepspeed_config


def divided_where_built(config: Config) -> Any:
    """A context in which each layer is divided as soon as it is built: no rank ever has the whole model."""
    # Without overrides torch makes the tensors that it is asked for: some buffers are fp32 in any run.
    return deepspeed.zero.Init(config_dict_or_path=build_deepspeed_config(config), tensor_overrides=set())


class Zero3Engine(DeepSpeedEngine):
    """Divides gradients, weights and the optimizer's state over the data-parallel ranks of `model`'s grid; collective.

    Arguments as deepspeed.initialize's; `settings`: its `config`.
    """

    module: Any

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, settings: dict[str, Any]) -> None:
        grid = model.mpu()
        super().__init__(
            args=None,
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            mpu=grid,
            dist_init_required=False,
            config=settings,
            config_class=DeepSpeedConfig(settings, grid),
        )
        self.grid = grid
        self.batch_timer = self.tput_timer
        self._batch_fn: Callable[[Any], Any] | None = None
        if model.activation_checkpoint_interval > 0:
            model._precompute_checkpointable_values()
        self._configure_python_gc()

    def is_last_stage(self) -> bool:
        return True

    def set_batch_fn(self, batch_fn: Callable[[Any], Any]) -> None:
        """What makes (inputs, labels) of a micro-batch."""
        self._batch_fn = batch_fn

    def train_batch(self, data_iter: Iterator[Any]) -> torch.Tensor:
        """One iteration. Returns the mean loss over its micro-batches and the replicas."""
        self.module.train()
        count, losses = self.gradient_accumulation_steps(), []
        for number in range(1, count + 1):
            # DeepSpeed's own count of micro-batches would be out of step after a change of the batch size.
            self.set_gradient_accumulation_boundary(number == count)
            loss = self._loss(data_iter)
            self.backward(loss)
            losses.append(loss.detach())
            self.step()
        return self._reported("Train/Samples/train_loss", losses)

    def eval_batch(self, data_iter: Iterator[Any]) -> torch.Tensor:
        """The mean loss over as many micro-batches as an iteration has."""
        self.module.eval()
        losses = []
        with torch.no_grad():
            for _ in range(self.gradient_accumulation_steps()):
                losses.append(self._loss(data_iter))
                checkpointing.reset()  # as PipelineEngine, between evaluations
        return self._reported("Train/Samples/eval_loss", losses)

    def _loss(self, data_iter: Iterator[Any]) -> torch.Tensor:
        assert self._batch_fn is not None
        inputs, labels = self._batch_fn(next(data_iter))
        return self.module.loss_fn(self(inputs), labels)

    def _reported(self, name: str, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Their mean, which the monitors of the DeepSpeed file get, too, as from PipelineEngine."""
        mean = self._mean(losses)
        if self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events([(name, mean.item(), self.global_samples)])
        return mean

    def _mean(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """In the order of PipelineEngine's sums, so that the same losses have the same mean."""
        total = torch.zeros_like(losses[0])
        for loss in losses:
            total += loss
        total = total / len(losses)
        group = self.grid.get_data_parallel_group()
        dist.all_reduce(total, group=group)
        return (total / dist.get_world_size(group)).float()
