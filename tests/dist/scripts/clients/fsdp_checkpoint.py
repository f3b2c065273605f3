# type: ignore  (as users write it)
"""An FSDP2 training with distributed checkpoints, as PyTorch's recipes show it; it knows nothing of being traced.

torchrun ... fsdp_checkpoint.py save|async_save STEPS

It goes on from ./checkpoint if that is there, and saves once at its end.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


how, steps = sys.argv[1], int(sys.argv[2])
width = int(os.environ.get("WIDTH", "1024"))
dist.init_process_group("cpu:gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if os.path.exists("checkpoint"):
    began = time.monotonic_ns()
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id="checkpoint")
    print("load", began, time.monotonic_ns())
batch = torch.randn(1, width, generator=torch.Generator().manual_seed(2))
for step in range(1, steps + 1):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}", flush=True)
began = time.monotonic_ns()
state = {"app": AppState(model, optimizer)}
if how == "save":
    dcp.save(state, checkpoint_id="checkpoint")
else:
    future = dcp.async_save(state, checkpoint_id="checkpoint")
    print("returned", began, time.monotonic_ns())
    future.result(timeout=300)
print("save", began, time.monotonic_ns())
dist.destroy_process_group()
