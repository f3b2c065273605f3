# type: ignore  (as users write it)
"""A DDP training that starts its ranks itself, as PyTorch's DDP tutorial shows it; it knows nothing of being traced.

spawn_checkpoint.py [STEPS]; PORT: where its ranks meet
"""

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def demo_checkpoint(rank, world_size, port, steps):
    setup(rank, world_size, port)
    width = int(os.environ.get("WIDTH", "512"))
    torch.manual_seed(1)
    model = DDP(torch.nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    if rank == 0:
        began = time.monotonic_ns()
        torch.save(model.state_dict(), "model.checkpoint")
        print("save", began, time.monotonic_ns())
    dist.barrier()
    began = time.monotonic_ns()
    weights = torch.load("model.checkpoint", map_location="cpu", weights_only=True)
    print("load", began, time.monotonic_ns())
    model.load_state_dict(weights)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(torch.ones(4, width)), torch.ones(4, width))
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}")
    dist.destroy_process_group()


def run(rank, *arguments):
    with open(f"rank_{rank}.log", "w") as log, contextlib.redirect_stdout(log):
        demo_checkpoint(rank, *arguments)


if __name__ == "__main__":
    mp.spawn(run, args=(2, os.environ["PORT"], int(sys.argv[1]) if len(sys.argv) > 1 else 3), nprocs=2, join=True)
