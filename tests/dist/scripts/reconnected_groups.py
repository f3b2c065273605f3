"""Connects groups of which the last rank is late: it comes once the others have connected the one without it.

The others then send to each other, in the group of all ranks, without it. Afterwards that group is used by all.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  it is documented

from megatron.parallel import reconnecting

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
timeout = timedelta(seconds=300)
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=rank == 0)

reconnecting.create_world(rank, ranks, timeout)
again: Any = dist.new_group(list(range(ranks)), timeout)
shorter: Any = dist.new_group(list(range(ranks)), timedelta(seconds=200))
others: Any = dist.new_group(list(range(ranks - 1)), timeout)

connect = reconnecting.ReconnectingGroup.connect


def told(self: Any, at: Any) -> None:
    connect(self, at)
    if self.size() == ranks - 1:
        store.set(f"connected_{rank}", "")


setattr(reconnecting.ReconnectingGroup, "connect", told)  # noqa: B010  types see no method there
if rank == ranks - 1:
    store.wait([f"connected_{other}" for other in range(ranks - 1)], timeout)
reconnecting.connect_groups(store)
world: Any = dist.group.WORLD
if rank < 2:  # the last rank has no part in it, so that nothing connects that it would be waited for with
    message = torch.full((1,), 5.0 + rank)
    dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
    assert int(message) == 5
    dist.send(message, 0) if rank == 1 else dist.recv(message, 1)
    store.set(f"exchanged_{rank}", "")
else:
    store.wait(["exchanged_0", "exchanged_1"], timeout)
assert not (world.is_connected or again.is_connected or shorter.is_connected), "groups of all ranks are not used yet"
for group in (None, again, shorter) if rank == ranks - 1 else (None, again, shorter, others):
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert int(total) == dist.get_world_size(group)
if rank != 1:  # in no smaller group together, so that their messages go over that of all ranks
    message = torch.full((1,), 5.0 + rank)
    dist.send(message, ranks - 1) if rank == 0 else dist.recv(message, 0)
    assert int(message) == 5
print("shared", world.inner is again.inner, world.inner is shorter.inner, flush=True)
dist.barrier()
reconnecting.disconnect_groups()
assert not (world.is_connected or again.is_connected or shorter.is_connected)
os._exit(0)  # torch would wait for the others in its groups
