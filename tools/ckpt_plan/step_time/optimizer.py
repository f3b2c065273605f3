"""Bytes that DeepSpeed's bf16 optimizer (ZeRO stage 1) moves through memory per parameter.

A test counts them in DeepSpeed's own code. Master weights, moments and accumulated gradients are fp32.
"""

from __future__ import annotations

from megatron.config import OptimizerConfig

# Of each parameter of the stage, in each micro batch; by bf16.immediate_grad_update DeepSpeed adds each gradient to the
# buffer when it is there, and frees it. Without, all are kept, and added to those of the micro batch before.
_ACCUMULATION = {"widens the gradient": 6, "adds it to the fp32 buffer": 12}
_KEPT = {"zeroes .grad": 2, "autograd adds the gradient to .grad": 6}
# Of each parameter of the stage, once in an iteration.
_WHOLE = {"copies the reduced gradients back": 8, "norm": 4, "clips": 8, "zeroes the fp32 buffer": 4}
_MEAN = 8  # over the replicas, where there are several
# DeepSpeed joins the two groups of gradients in one buffer first, unless the larger has more elements than this.
_BUCKET, _JOIN = 500_000_000, 8
# Of each parameter of the partition that a replica updates.
_UPDATE = {"adam": 28, "sgd": 12}  # reads gradient, weight and moments, writes weight and moments
_MOMENTUM = 8
_TO_WEIGHTS = 6  # master weights to bf16


def each_micro_batch_bytes(immediate_grad_update: bool) -> int:
    """Per parameter of the stage."""
    return sum(_ACCUMULATION.values()) + (0 if immediate_grad_update else sum(_KEPT.values()))


def each_step_bytes(optimizer: OptimizerConfig, parameters: int, dp: int) -> float:
    """Of `parameters` on a stage with `dp` replicas."""
    whole = sum(_WHOLE.values()) - (0 if optimizer.clip_grad else _WHOLE["clips"])
    whole += (_MEAN if dp > 1 else 0) + (_JOIN if parameters <= _BUCKET else 0)
    update = _UPDATE[optimizer.optimizer] + _TO_WEIGHTS
    if optimizer.optimizer == "sgd" and optimizer.sgd_momentum:
        update += _MOMENTUM
    return parameters * (whole + update / dp)
