# type: ignore  (as users write it)
"""A DDP training that starts its ranks itself, as PyTorch's DDP tutorial shows it; it knows nothing of being traced.

spawn_checkpoint.py [STEPS]
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def demo_checkpoint(rank, world_size, port, steps):
    setup(rank, world_size, port)
    width = int(os.environ.get("WIDTH", "512"))
    model = DDP(torch.nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    if rank == 0:
        torch.save(model.state_dict(), "model.checkpoint")
    dist.barrier()
    model.load_state_dict(torch.load("model.checkpoint", map_location="cpu", weights_only=True))
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.ones(4, width)), torch.ones(4, width)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    mp.spawn(demo_checkpoint, args=(2, port, int(sys.argv[1]) if len(sys.argv) > 1 else 3), nprocs=2, join=True)
