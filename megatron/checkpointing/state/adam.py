"""Converts Adam's state of a checkpoint for the Adam of this run: torch's, or apex's or DeepSpeed's FusedAdam.

On CUDA upstream trains with FusedAdam, whose parameter groups have other options than torch's: they say whether the
bias of the moments is corrected, they count the steps, and they do not name the rule of weight decay, which is always
the decoupled one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.checkpointing.engines.errors import CheckpointMismatchError

logger = logging.getLogger(__name__)

_OF_FUSED = "bias_correction"


def convert_adam_state(base: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Convert `base`, the state_dict of an Adam, to the kind of Adam whose parameter groups are `own`.

    Both have the groups in the same order. No tensor of `base` is copied or changed: moments and steps are carried over
    bit for bit. A conversion is logged, since the other Adam rounds its steps differently.

    Raises CheckpointMismatchError if `base` was trained with L2 weight decay, since FusedAdam's is always decoupled.
    """
    if isinstance(base, list):  # zero_optimization.elastic_checkpoint
        return base
    groups: list[dict[str, Any]] = []
    state = dict(base["state"])
    for saved, here in zip(base["param_groups"], own, strict=True):
        if (_OF_FUSED in saved) == (_OF_FUSED in here):
            groups.append(saved)
            continue
        _check_weight_decay(saved, here)
        known = {key: value for key, value in saved.items() if key in here}
        groups.append(dict(here) | known)
        for param in saved["params"]:
            values = state.get(param)
            if values is None:  # before the first step
                continue
            step = values["step"] if "step" in values else saved.get("step", 0)
            if _OF_FUSED in here:
                groups[-1]["step"] = int(step)
            else:
                state[param] = {**values, "step": torch.tensor(float(step))}
    if any(mine is not theirs for mine, theirs in zip(groups, base["param_groups"], strict=True)):
        kinds = ("FusedAdam (apex's or DeepSpeed's)", "torch's Adam")
        saved_by, here_is = kinds if _OF_FUSED not in own[0] else kinds[::-1]
        logger.info(
            "the checkpoint's optimizer is %s and this run's %s: moments and steps are carried over bit for bit, but "
            "further steps may round differently",
            saved_by,
            here_is,
        )
    return {**base, "state": state, "param_groups": groups}


def _check_weight_decay(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    if _OF_FUSED in here and saved.get("decoupled_weight_decay") is False and saved.get("weight_decay"):
        raise CheckpointMismatchError(
            "the checkpoint was trained by torch's Adam with L2 weight decay (upstream on CPU), but this run's "
            "FusedAdam has decoupled weight decay: the training would change; resume without apex, or with "
            "--no-load-optim"
        )
