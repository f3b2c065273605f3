"""Two tensor-parallel ranks, of which rank 1 begins the backward pass of a column-parallel layer late.

Rank 1 waits until rank 0 has started a collective and then begun its `sys.argv[1]`-th product of that pass. If rank 0
does them in another order or waits for the collective first, rank 1 fails. `sys.argv[2:]`: --sequence-parallel, or
nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.parallel.layers import ColumnParallelLinear
from megatron.parallel.placement import Placement
from megatron.parallel.topology import TensorParallelGroup


class Products(TorchDispatchMode):
    """Tells the other rank when the product of this number begins, if a collective has been started before it."""

    def __init__(self, store: Any, number: int) -> None:
        super().__init__()
        self.store = store
        self.left = number
        self.started: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.started.append(func.name())
        if func is torch.ops.aten.mm.default:
            self.left -= 1
            if self.left == 0 and self.started:
                self.store.set("product", "begun")
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tp = TensorParallelGroup(rank, size, torch.distributed.group.WORLD, "--sequence-parallel" in sys.argv)
    layer = ColumnParallelLinear(
        16, (32,), bias=True, init_std=0.1, place=Placement(tp, torch.float32, torch.device("cpu"))
    )
    layer.reset_parameters(1, "layer")
    x = torch.ones(2, 8 // (size if tp.splits_sequence else 1), 16, requires_grad=True)
    y = layer(x)
    store = _get_default_store()
    if rank == 0:
        with Products(store, int(sys.argv[1])):
            y.sum().backward()
    else:
        store.wait(["product"], timedelta(seconds=60))
        y.sum().backward()
    expected = layer.weight.detach().sum(0)
    torch.distributed.all_reduce(expected)
    torch.testing.assert_close(x.grad, expected.expand_as(x))
    torch.distributed.destroy_process_group()
