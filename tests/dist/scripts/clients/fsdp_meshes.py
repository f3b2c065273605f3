# type: ignore  (as users write it)
"""Modules that torch's FSDP shards in each way that it knows, one after another; it knows nothing of being traced."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

dist.init_process_group("gloo")


def model():
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(2)])


fully_shard(model())  # over all ranks
fully_shard(model(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
fully_shard(model(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "tp"))["shards"])
groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
mine = groups[dist.get_rank() // 2], groups[2 + dist.get_rank() % 2]
cpu = torch.device("cpu")
FullyShardedDataParallel(model(), process_group=mine, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=cpu)
FullyShardedDataParallel(model(), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=cpu)
dist.destroy_process_group()
