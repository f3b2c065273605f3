"""Collectives of a group of ranks that run beside computation: each starts at once, and its result waits for the end.

Code that torch.compile traces has torch's functional collectives instead (the operators behind
torch.distributed._functional_collectives): those of torch.distributed that return at once would end the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Finish = Callable[[], torch.Tensor]


def all_reduce(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of a tensor over the ranks; written over `tensor` if that is contiguous."""
    tensor = tensor.contiguous()
    if torch.compiler.is_compiling():
        return start_all_reduce(tensor, group)()
    dist.all_reduce(tensor, group=group)
    return tensor


def start_all_reduce(tensor: torch.Tensor, group: Any) -> Finish:
    """Sum a contiguous tensor over the ranks; the result may be written over it."""
    if torch.compiler.is_compiling():
        return _wait(torch.ops._c10d_functional.all_reduce(tensor, "sum", group.group_name))
    return _finish(dist.all_reduce(tensor, group=group, async_op=True), tensor)


def start_all_gather(part: torch.Tensor, size: int, group: Any) -> Finish:
    """Gather `part` [n, ...] of all `size` ranks: [size x n, ...]."""
    part = part.contiguous()
    if torch.compiler.is_compiling():
        return _wait(torch.ops._c10d_functional.all_gather_into_tensor(part, size, group.group_name))
    gathered = part.new_empty((size * part.shape[0], *part.shape[1:]))
    return _finish(dist.all_gather_into_tensor(gathered, part, group=group, async_op=True), gathered)


def start_reduce_scatter(parts: torch.Tensor, size: int, group: Any) -> Finish:
    """Sum `parts` [size x n, ...] over the `size` ranks and keep this rank's [n, ...]."""
    if torch.compiler.is_compiling():
        return _wait(torch.ops._c10d_functional.reduce_scatter_tensor(parts, "sum", size, group.group_name))
    mine = parts.new_empty((parts.shape[0] // size, *parts.shape[1:]))
    return _finish(dist.reduce_scatter_tensor(mine, parts, group=group, async_op=True), mine)


def all_to_all(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """Send `parts` [size, ...], one to each rank; what each has for this one, in the same shape, by rank."""
    parts = parts.contiguous()
    if torch.compiler.is_compiling():
        each = [1] * parts.shape[0]
        return _wait(torch.ops._c10d_functional.all_to_all_single(parts, each, each, group.group_name))()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def _finish(work: Any, result: torch.Tensor) -> Finish:
    def finish() -> torch.Tensor:
        work.wait()
        return result

    return finish


def _wait(started: torch.Tensor) -> Finish:
    return lambda: torch.ops._c10d_functional.wait_tensor(started)  # type: ignore[no-any-return]
