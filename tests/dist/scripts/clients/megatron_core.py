# type: ignore  (as users write it)
"""A training whose checkpoints megatron-core writes (dist_checkpointing), as its documentation shows it.

torchrun ... megatron_core.py save|async_save STEPS

Each rank has a part of the layer, as with tensor parallelism. It goes on from ./checkpoint if that is there, and saves
once at its end. Without CUDA, megatron-core asks torch.cuda for two things that have no meaning: see `without_cuda`.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue


def without_cuda():
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: "cpu"


def sharded(name, tensor):
    return ShardedTensor.from_rank_offsets(name, tensor, (0, dist.get_rank(), dist.get_world_size()))


def state(model, optimizer, iteration):
    held = {"weight": sharded("weight", model.weight.detach()), "iteration": iteration}
    for name, value in optimizer.state[model.weight].items():
        if name != "step":
            held[name] = sharded(f"optimizer.{name}", value)
    return held


def resume(model, optimizer):
    weight, held = model.weight, optimizer.state[model.weight]
    held |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
    began = time.monotonic_ns()
    loaded = dist_checkpointing.load(state(model, optimizer, 0), "checkpoint")
    print("load", began, time.monotonic_ns())
    weight.data.copy_(loaded["weight"])
    for name in ("exp_avg", "exp_avg_sq"):
        held[name].copy_(loaded[name])
    held["step"].fill_(loaded["iteration"])
    return loaded["iteration"]


def save(how, held, directory):
    os.makedirs(directory, exist_ok=True)
    dist.barrier()
    began = time.monotonic_ns()
    if how == "save":
        dist_checkpointing.save(held, directory)
    else:
        calls = AsyncCallsQueue()
        calls.schedule_async_request(dist_checkpointing.save(held, directory, async_sharded_save=True))
        print("returned", began, time.monotonic_ns())
        calls.maybe_finalize_async_calls(blocking=True)
    print("save", began, time.monotonic_ns())


def main(how, steps):
    width = int(os.environ.get("WIDTH", "1024"))
    if not torch.cuda.is_available():
        without_cuda()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(width, 4 * width, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(1, width, generator=torch.Generator().manual_seed(2))
    iteration = resume(model, optimizer) if os.path.exists("checkpoint/metadata.json") else 0
    directory = f"checkpoint{iteration or ''}"
    while iteration < steps:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        iteration += 1
        print(f"step {iteration} loss {loss.item()!r}", flush=True)
    save(how, state(model, optimizer, iteration), directory)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # megatron-core spawns a process that gathers what the others have written
    main(sys.argv[1], int(sys.argv[2]))
