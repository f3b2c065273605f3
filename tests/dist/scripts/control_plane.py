"""Every rank runs the agreements of megatron.parallel.control_plane and prints what it got."""

from __future__ import annotations

import json
import os

import torch.distributed as dist

from megatron.parallel.control_plane import ControlPlane

dist.init_process_group("gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
control = ControlPlane(rank, world_size, dist.new_group(backend="gloo"))
print(
    json.dumps(
        {
            "gather": control.gather({"rank": rank, "items": [None] * rank}),
            "broadcast": control.broadcast(("from", rank, "x" * 100_000 * (rank == 0))),
            "nobody": control.agree(None),
            "odd": control.agree(f"failure of {rank}" if rank % 2 else None),
            "empty": control.agree("" if rank == 0 else None),
        }
    )
)
dist.barrier()
dist.destroy_process_group()
