"""Selective recomputation: results that are large and cheap are computed again in the backward pass instead of kept.

Korthikanti et al. (arXiv:2205.05198, section 5) recompute the core of attention. Here its kernel keeps no matrix of
scores; what is left that a few operations per element make of what is kept anyway are the results of the
normalisations and of the MLP's activation function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

Layer = Callable[[torch.Tensor], torch.Tensor]


def feed_recomputed(producer: Layer, consumer: Layer, x: torch.Tensor) -> torch.Tensor:
    """consumer(producer(x)), with the same gradients to the last bit, of which producer(x) is not kept.

    Where the backward pass of `consumer` needs producer(x), it is computed from `x` again. `producer` keeps `x` itself,
    does not draw random numbers, and its result shares no memory with `x`.
    """
    result = producer(x)
    storage = _storage_of(result)

    def pack(kept: torch.Tensor) -> Any:
        if _storage_of(kept) != storage:
            return kept.detach()  # a result that its own node keeps would keep the node: a circle that nothing collects
        return kept.size(), kept.stride(), kept.storage_offset()

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        with torch.no_grad():
            return producer(x).as_strided(*packed)

    with saved_tensors_hooks(pack, unpack):
        return consumer(result)


def _storage_of(tensor: torch.Tensor) -> int:
    """Identifies the storage: on the meta device, where ckpt-plan counts, the addresses of all data are 0."""
    return tensor.untyped_storage()._cdata
