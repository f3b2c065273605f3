"""The three settings of recomputation, the memory that each needs, and the least recomputation that a device allows.

No torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.config import Config, ModelConfig

from ..common.formatting import size
from .device_memory import device_bytes
from .presets import Planned, config_for
from .tensors import plan_tensors, stage_bounds

MODES = ("none", "selective", "full")  # from the most memory to the least
# Of pretrain_gpt.py, as the scripts of the presets give them.
FLAGS = {
    "none": (), "selective": ("--recompute-granularity", "selective"),
    "full": ("--checkpoint-activations", "--deepspeed-activation-checkpointing"),
}  # fmt: skip
DEVICE_BYTES = 80 * 10**9  # DEVICE_GB of the scripts, by default
USABLE = 0.8  # of a device's memory: buffers, workspaces and fragmentation are not in the estimate
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


@dataclass(frozen=True)
class Choice:
    """`by_mode`: bytes on the fullest device, of the modes that were tried; the last one is chosen."""

    by_mode: dict[str, int]
    device_bytes: int

    @property
    def mode(self) -> str:
        return list(self.by_mode)[-1]

    @property
    def reason(self) -> str:
        """One line."""
        usable = f"{USABLE:.0%} of {size(self.device_bytes, 0)}"
        needs = ", ".join(f"{size(needed)} with {mode}" for mode, needed in self.by_mode.items())
        if self.by_mode[self.mode] > USABLE * self.device_bytes:
            return f"{needs}: more than {usable} even so; lower the micro batch, or split the model further"
        return f"{needs}; {usable} may be used"


def choose(planned: Planned, device_bytes: int) -> Choice:
    """The first of MODES that fits, or the last. Raises ConfigError as plan_tensors does."""
    config, layout, vocab_sizes = planned
    tried: dict[str, int] = {}
    for mode in MODES:
        tried[mode] = fullest_device_bytes((with_mode(config, mode), layout, vocab_sizes))
        if tried[mode] <= USABLE * device_bytes:
            break
    return Choice(tried, device_bytes)


def preset_for(
    model: str, tp: int, pp: int, dp: int, vocab_size: int | None, *, flags: Sequence[str], recompute: str = "auto"
) -> Planned:
    """As config_for, with the flags that RECOMPUTE of the scripts adds on devices of DEVICE_BYTES.

    Where `flags` say what is recomputed, nothing is added.
    """
    planned = config_for(model, tp, pp, dp, vocab_size, flags=flags)
    if mode_of(planned[0].model) != "none":
        return planned
    mode = choose(planned, DEVICE_BYTES).mode if recompute == "auto" else recompute
    return planned if mode == "none" else config_for(model, tp, pp, dp, vocab_size, flags=[*FLAGS[mode], *flags])
