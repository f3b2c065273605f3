"""The three settings of recomputation, a configuration with another one, and the memory that it needs."""

from __future__ import annotations

import itertools
from dataclasses import replace

from megatron.config import Config, ModelConfig

from ..memory import device_bytes
from ..presets import Planned
from ..tensors import plan_tensors, stage_bounds

MODES = ("none", "selective", "full")
# Flags that say how activations are recomputed, and are refused where none are.
_ONLY_WITH_FULL = (
    "deepspeed_activation_checkpointing", "partition_activations", "contigious_checkpointing", "checkpoint_in_cpu",
    "synchronize_each_layer", "profile_backward",
)  # fmt: skip


def mode_of(model: ModelConfig) -> str:
    """Which of MODES a model is trained with."""
    if model.checkpoint_activations:
        return "full"
    return "selective" if model.recomputes_selectively else "none"


def with_mode(config: Config, mode: str) -> Config:
    """`config` with recomputation `mode`; `full` with the chunks that it has."""
    if mode == mode_of(config.model):
        return config
    chunks = config.model.checkpoint_num_layers if mode == "full" else 1
    model = replace(
        config.model,
        checkpoint_activations=mode == "full",
        checkpoint_num_layers=chunks,
        recompute_granularity=None if mode == "none" else mode,
        recompute_activations=False,
        recompute_method=None,
        recompute_num_layers=None,
    )
    if mode == "full":
        return replace(config, model=model)
    parallel = replace(config.parallel, **dict.fromkeys(_ONLY_WITH_FULL, False))
    return replace(config, model=model, parallel=parallel)


def fullest_device_bytes(planned: Planned) -> int:
    """Bytes that the fullest device needs at least."""
    config, layout, (_, padded) = planned
    # Pipeline layers 2 to num_layers + 1 are the blocks.
    bounds = stage_bounds(config.model.num_layers, layout.pp)
    cuts = [min(max(bound - 2, 0), config.model.num_layers) for bound in bounds]
    blocks = [end - first for first, end in itertools.pairwise(cuts)]
    needs = (
        device_bytes(config, rank.parameters, blocks[rank.at.pp], rank.at.pp, padded, rank.by_kind)
        for rank in plan_tensors(planned).ranks
    )
    return max(sum(need.values()) for need in needs)
