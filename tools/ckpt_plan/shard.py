"""The ZeRO-1 shard of one rank on the meta device: what DeepSpeed's optimizers hold when they are saved.

`Bf16Shard` and `ZeroShard` stand in for BF16_Optimizer (bf16) and DeepSpeedZeroOptimizer (fp16, fp32) of DeepSpeed
0.19. They save with the methods of those classes, and implement only what the constructors do with process groups and
memory: flatten each parameter group, pad it to a multiple of 2 x DP elements, keep partition `dp_rank` of DP equal
ones (runtime/bf16_optimizer.py, _setup_for_real_optimizer; runtime/zero/stage_1_and_2.py, __init__).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.precision_config import get_float16_config
from deepspeed.runtime.utils import align_dense_tensors
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.mixed_precision_linkage import link_hp_params

from megatron.config import Config, ConfigError, OptimizerConfig
from megatron.model.gpt_model import TORCH_DTYPES
from megatron.optimizer.build import build_optimizer
from megatron.parallel.topology import Coordinates, Layout

_ALIGNMENT = 2  # elements, times DP: nccl_start_alignment_factor of both classes
_CHANGES_SHARDS = ("round_robin_gradients", "parameter_alignment", "elastic_checkpoint", "offload_optimizer")


class _Shard:
    """What both classes share; attributes have the names that DeepSpeed's methods expect."""

    def __init__(self, model: torch.nn.Module, config: Config, layout: Layout, at: Coordinates) -> None:
        self.optimizer: Any = build_optimizer(model, config.optimizer)
        self.param_names = {param: name for name, param in model.named_parameters()}
        self.clip_grad = config.optimizer.clip_grad
        groups = self.optimizer.param_groups
        self.groups: list[list[torch.Tensor]] = [list(group["params"]) for group in groups]
        self.masters: list[torch.Tensor] = []
        self.paddings: list[int] = []
        self.partition_size: list[int] = []
        self.partition_count: list[int] = []
        for index, group in enumerate(groups):
            mark = getattr(group["params"][0], "divided_expert", None)
            ranks = 1 if mark is None else mark.ranks  # such a group is partitioned over each of so many DP ranks
            self.partition_count.append(layout.dp // ranks)
            master = self._partition(index, layout.dp // ranks, at.dp // ranks)
            self.masters.append(master)
            group["params"] = [master]
        self.optimizer.state.clear()
        for master in self.masters:
            self.optimizer.state[master] = _state_after_a_step(config.optimizer, master)

    def _partition(self, index: int, dp_size: int, dp_rank: int) -> torch.Tensor:
        params = self.groups[index]
        num_elements = sum(param.numel() for param in params)
        total = sum(tensor.numel() for tensor in align_dense_tensors(params, _ALIGNMENT * dp_size))
        size = total // dp_size
        master = torch.empty(size, dtype=torch.float32, device="meta", requires_grad=True)
        link_hp_params(
            lp_param_list=params,
            flat_hp_partition=master,
            gradient_dict={},
            offload_gradient_dict={},
            use_offload=False,
            param_group_index=index,
            partition_start=dp_rank * size,
            partition_size=size,
            dp_group=None,
        )
        self.partition_size.append(size)
        self.paddings.append(self._padding(num_elements, size, dp_size, dp_rank))
        return master

    @staticmethod
    def _padding(num_elements: int, size: int, dp_size: int, dp_rank: int) -> int:
        raise NotImplementedError

    def _get_universal_checkpoint_info(self) -> None:
        return None


class Bf16Shard(_Shard):
    """Stands in for BF16_Optimizer."""

    state_dict = BF16_Optimizer.state_dict
    _create_param_mapping = BF16_Optimizer._create_param_mapping

    def __init__(self, model: torch.nn.Module, config: Config, layout: Layout, at: Coordinates) -> None:
        super().__init__(model, config, layout, at)
        self.bf16_groups = self.groups
        self.fp32_groups_flat_partition = self.masters
        self.group_paddings = self.paddings
        self.bf16_partitioned_groups = [
            [torch.empty(size, dtype=torch.bfloat16, device="meta")] * count
            for size, count in zip(self.partition_size, self.partition_count, strict=True)
        ]
        self._param_slice_mappings = self._create_param_mapping()

    @staticmethod
    def _padding(num_elements: int, size: int, dp_size: int, dp_rank: int) -> int:
        """Padding elements at the end of the parameter group; counted on its last rank."""
        return size * dp_size - num_elements if dp_rank == dp_size - 1 else 0


class ZeroShard(_Shard):
    """Stands in for DeepSpeedZeroOptimizer, stage 1."""

    state_dict = DeepSpeedZeroOptimizer.state_dict
    _create_param_mapping = DeepSpeedZeroOptimizer._create_param_mapping
    _get_groups_without_padding = DeepSpeedZeroOptimizer._get_groups_without_padding

    def __init__(
        self,
        model: torch.nn.Module,
        config: Config,
        layout: Layout,
        at: Coordinates,
        ds_config: Mapping[str, Any],
        steps: int,
    ) -> None:
        super().__init__(model, config, layout, at)
        self.bit16_groups = self.round_robin_bit16_groups = self.groups
        self.single_partition_of_fp32_groups = self.masters
        self.groups_padding = self.paddings
        self.round_robin_bit16_padding = [[0] * len(group) for group in self.groups]
        self.round_robin_bit16_offsets = [_offsets(group) for group in self.groups]
        self.partition_gradients = self.elastic_checkpoint = self.overflow = False
        self.loss_scaler = _loss_scaler(ds_config, config, steps)
        self.dynamic_loss_scale = self.loss_scaler.dynamic
        self._param_slice_mappings = self._create_param_mapping()

    @staticmethod
    def _padding(num_elements: int, size: int, dp_size: int, dp_rank: int) -> int:
        """Padding elements in this partition."""
        return min(size, max(0, (dp_rank + 1) * size - num_elements))


def build_shard(
    model: torch.nn.Module, config: Config, layout: Layout, at: Coordinates, ds_config: Mapping[str, Any], steps: int
) -> Bf16Shard | ZeroShard:
    """The shard of the rank at `at` after `steps` iterations.

    Raises ConfigError for DeepSpeed options that change its layout.
    """
    zero = ds_config["zero_optimization"]
    changed = [key for key in _CHANGES_SHARDS if zero.get(key)]
    if changed:
        raise ConfigError(
            f"--deepspeed_config {config.parallel.deepspeed_config}: zero_optimization.{changed[0]} "
            f"{zero[changed[0]]!r} changes what a shard holds, which cannot be planned; leave it out"
        )
    if config.model.bf16:
        return Bf16Shard(model, config, layout, at)
    return ZeroShard(model, config, layout, at, ds_config, steps)


def _state_after_a_step(config: OptimizerConfig, master: torch.Tensor) -> dict[str, Any]:
    """The optimizer's state for `master`."""

    def of_master(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0:
            return value.clone()
        return torch.empty(master.shape, dtype=value.dtype, device="meta")

    return {name: of_master(value) for name, value in _trial_state(config).items()}


@functools.lru_cache(maxsize=1)
def _trial_state(config: OptimizerConfig) -> dict[str, Any]:
    """The optimizer's state for a parameter, found by one step on a single element."""
    trial = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1))])
    trial[0].grad = torch.zeros(1)
    optimizer = build_optimizer(trial, config)
    optimizer.step()
    return dict(optimizer.state[trial[0]])


def _loss_scaler(ds_config: Mapping[str, Any], config: Config, steps: int) -> Any:
    """DeepSpeed's object after `steps` steps without overflow."""
    options = get_float16_config(dict(ds_config))
    scaler: Any = CreateLossScaler(
        dtype=TORCH_DTYPES[config.model.params_dtype],
        static_loss_scale=options.loss_scale,
        dynamic_scaling=options.loss_scale == 0,
        dynamic_loss_args=options.dynamic_loss_scale_args(),
    )
    if scaler.dynamic:
        scaler.cur_iter = steps
    return scaler


def _offsets(params: list[torch.Tensor]) -> list[int]:
    found, offset = [], 0
    for param in params:
        found.append(offset)
        offset += param.numel()
    return found
