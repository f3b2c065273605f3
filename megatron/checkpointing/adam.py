"""Adam's state out of a checkpoint, for the Adam that is here: torch's, and apex's or DeepSpeed's FusedAdam.

On CUDA upstream trains with FusedAdam, whose parameter groups have other options than torch's: they say whether the
moments' bias is corrected, not by which rule weights decay (it is the decoupled one), and they count the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_OF_FUSED = "bias_correction"


def as_here(base: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """`base`, the state_dict of an Adam, as one with the parameter groups `own` keeps it; as it is if that is its kind.

    Both have the groups in the same order. No tensor of `base` is copied or changed.
    """
    if isinstance(base, list):  # zero_optimization.elastic_checkpoint
        return base
    groups: list[dict[str, Any]] = []
    state = dict(base["state"])
    for saved, here in zip(base["param_groups"], own, strict=True):
        if (_OF_FUSED in saved) == (_OF_FUSED in here):
            groups.append(saved)
            continue
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
    return {**base, "state": state, "param_groups": groups}
