# type: ignore  (as users write it)
"""A DDP training that saves in another way after each step; it knows nothing of being traced.

torchrun ... unusual_saves.py
"""

import io
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel as DDP


class Unpicklable:
    def __reduce__(self):
        raise RuntimeError("cannot be pickled")


class Slow:
    """Its pickling takes until the main thread has entered the function."""

    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        while self.function not in entered:
            time.sleep(0.001)
        return int, ()


def by_all_ranks_and_by_one():
    dcp.save({"model": model.module.state_dict()}, checkpoint_id="all")
    if rank == 0:
        dcp.save({"model": model.module.state_dict()}, checkpoint_id="best", no_dist=True)


def by_threads_of_a_pool():
    sys.setprofile(lambda frame, event, _: entered.add(frame.f_code.co_name))  # of this thread alone
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(torch.save, {"model": model.module.state_dict(), "slow": Slow("result")}, f"a_{rank}.pt")
        began = time.monotonic_ns()
        first.result()
        print("waited", began, time.monotonic_ns())
        pool.submit(torch.save, {"model": model.module.state_dict(), "slow": Slow("join")}, f"b_{rank}.pt")
    sys.setprofile(None)


def with_an_error():
    if rank == 0:
        try:
            torch.save({"model": model.module.state_dict(), "bad": Unpicklable()}, "broken.pt")
        except RuntimeError as error:
            print("failed:", error)
        torch.save(model.module.state_dict(), "snapshot.pt")


def through_memory():
    stream = io.BytesIO()
    torch.save(model.module.state_dict(), stream)
    stream.seek(0)
    torch.load(stream)


width = int(os.environ.get("WIDTH", "1024"))
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
entered = set()
model = DDP(torch.nn.Linear(width, width))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, save in enumerate((by_all_ranks_and_by_one, by_threads_of_a_pool, with_an_error, through_memory), 1):
    optimizer.zero_grad()
    loss = model(torch.ones(1, width)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}", flush=True)
    save()
dist.destroy_process_group()
