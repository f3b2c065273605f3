"""Takes DeepSpeed's engine back to what it was when it was built, whatever has ended its last step and where.

No list of what a step changes could be kept: counters, timers that run, pipeline buffers, gradients, hooks, moments,
the loss scale, what others have put in place of a method. So all attributes of the engine and of what it is made of
are remembered once: the model with its hooks, both optimizers, the schedule, timers. The contents of tensors are not,
but of the gradients that are added to; weights, masters and moments are loaded, or drawn again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

_PACKAGES = ("deepspeed.", "megatron.model.", "megatron.optimizer.", "megatron.parallel.")
_COLLECTIONS = (dict, list, set, deque)


class AsBuilt:
    """The attributes of an engine that has not trained yet."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._collections: list[tuple[Any, Any]] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        seen: dict[int, Any] = {}  # also keeps them, so that no other gets their number
        left: list[Any] = [engine]
        while left:
            one = left.pop()
            if id(one) not in seen:
                seen[id(one)] = one
                left.extend(self._remember(one))

    def restore(self) -> None:
        for one, attributes in self._attributes:
            vars(one).clear()
            vars(one).update(attributes)
        for one, content in self._collections:
            one.clear()
            if isinstance(one, (dict, set)):
                one.update(content)
            else:
                one.extend(content)
        for tensor, gradient in self._gradients:
            tensor.grad = None if gradient is None else gradient.zero_()  # as an optimizer's on the host begins
        # Of the bf16 optimizer; the others accumulate in `grad`.
        for sums in getattr(self._engine.optimizer, "fp32_groups_gradients_flat", ()):
            sums.zero_()

    def _remember(self, one: Any) -> Iterator[Any]:
        """Returns what it consists of."""
        if isinstance(one, _COLLECTIONS):
            self._collections.append((one, copy.copy(one)))
            yield from one.values() if isinstance(one, dict) else one
        elif isinstance(one, tuple):
            yield from one
        elif isinstance(one, torch.Tensor):
            if one.is_leaf:
                self._gradients.append((one, one.grad))
            yield from self._remember_attributes(one)
        elif _is_part(one):
            yield from self._remember_attributes(one)

    def _remember_attributes(self, one: Any) -> Iterator[Any]:
        attributes = getattr(one, "__dict__", None)
        if attributes is not None:
            self._attributes.append((one, dict(attributes)))
            yield from attributes.values()


def _is_part(one: Any) -> bool:
    """Whether it is an object whose attributes a step may change; no class, function or process group."""
    if isinstance(one, (type, dist.ProcessGroup)):
        return False
    ours = type(one).__module__.startswith(_PACKAGES)
    return ours or isinstance(one, (torch.nn.Module, torch.optim.Optimizer))
