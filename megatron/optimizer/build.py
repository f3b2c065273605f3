"""Builds the inner optimizer that DeepSpeed's ZeRO-1 wraps."""

from __future__ import annotations

import itertools
import logging
from importlib import util
from typing import Any

import torch

from megatron.config import OptimizerConfig

logger = logging.getLogger(__name__)


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups, with upstream's names and order: weights that decay, then biases and norms that do not.

    Experts that are divided over data-parallel ranks follow in groups of their own, two for each number of these ranks,
    with the key and the name by which DeepSpeed knows them.
    """
    shared: list[dict[str, Any]] = [
        {"name": "wd_no_scale_lr", "params": [], "wd_mult": 1.0, "lr_mult": 1.0},
        {"name": "no_wd_no_scale_lr", "params": [], "wd_mult": 0.0, "lr_mult": 1.0},
    ]
    of_experts: dict[str, list[dict[str, Any]]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        groups, experts = shared, getattr(param, "group_name", None)
        if experts is not None:
            own = [{**group, "name": experts, "moe": True, "params": []} for group in shared]
            groups = of_experts.setdefault(experts, own)
        groups[_no_weight_decay(name, param)]["params"].append(param)
    found = [*shared, *itertools.chain.from_iterable(group for _, group in sorted(of_experts.items()))]
    return [group for group in found if group["params"]]


def _no_weight_decay(name: str, param: torch.Tensor) -> bool:
    return name.endswith(".bias") or param.dim() == 1


def build_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that --optimizer names, for all parameters of `model`.

    adam is Adam with decoupled weight decay (AdamW, arXiv:1711.05101) on every device, as apex's FusedAdam is:
    apex's where CUDA is there and apex was built with its extensions for it, else torch's fused one.
    Raises ValueError for a name that is not supported.
    """
    groups = parameter_groups(model)
    if config.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            groups, lr=config.lr, weight_decay=config.weight_decay, momentum=config.sgd_momentum
        )
    elif config.optimizer == "adam":
        # In host memory it is torch's, too, not DeepSpeedCPUAdam, which the first start would compile: the state is the
        # same as without --cpu-optimizer, and a checkpoint continues with the flag or without.
        fused_adam = None if config.cpu_optimizer else _apex_fused_adam()
        # torch's AdamW is its Adam with the last option, except that it ignores what a checkpoint says about it:
        # a run that was started with L2 weight decay (upstream on CPU) must continue with it.
        options = {"adam_w_mode": True} if fused_adam else {"fused": True, "decoupled_weight_decay": True}
        optimizer = (fused_adam or torch.optim.Adam)(
            groups,
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            **options,
        )
    else:
        raise ValueError(f"--optimizer {config.optimizer}: not supported; use adam or sgd")
    cls = type(optimizer)
    logger.info("optimizer: %s.%s", cls.__module__, cls.__qualname__)
    return optimizer


def _apex_fused_adam() -> Any:
    """apex's FusedAdam; None, with a warning if apex is installed, where it could not run.

    A rank that computes with CUDA has initialised it by now. apex can be imported without its extension, and then the
    first object raises RuntimeError.
    """
    if not torch.cuda.is_initialized() or util.find_spec("apex") is None:
        return None
    try:
        import amp_C  # pyright: ignore[reportMissingImports]
        from apex.optimizers import FusedAdam  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        logger.warning("apex is installed without its CUDA extensions (%s): torch's Adam is used instead", error)
        return None
    if not hasattr(amp_C, "multi_tensor_adam"):
        logger.warning("apex's extension amp_C has no multi_tensor_adam: torch's Adam is used instead")
        return None
    return FusedAdam


def warn_of_l2_weight_decay(optimizer: Any) -> None:
    """Warn, after a load, that training continues with L2 instead of decoupled weight decay."""
    if any(group.get("decoupled_weight_decay") is False for group in optimizer.param_groups):
        logger.warning(
            "the checkpoint was trained with L2 weight decay, added to the gradient (upstream on CPU), not with "
            "decoupled weight decay; training continues with L2"
        )
