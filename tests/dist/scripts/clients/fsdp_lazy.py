# type: ignore  (as users write it)
"""An FSDP2 training with distributed checkpoints, as PyTorch's recipes show it, but for its storage: engine `lazy`.

torchrun ... fsdp_lazy.py save|async_save STEPS

It saves at each second step, and goes on from the newest checkpoint in ./checkpoints. With ONE_PLACE in the environment
all of its checkpoints are ./checkpoints/last.
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

from megatron.adapters.dcp import LazyReader, LazyWriter


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "step": self.step}

    def load_state_dict(self, state_dict):
        self.step = state_dict["step"]
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


how, steps = sys.argv[1], int(sys.argv[2])
width = int(os.environ.get("WIDTH", "256"))
dist.init_process_group("cpu:gloo")
group = dist.new_group(backend="gloo")  # async_save's collectives run beside those of the training
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)], torch.nn.BatchNorm1d(width))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
app = AppState(model, optimizer)
found = os.listdir("checkpoints") if os.path.isdir("checkpoints") else []
found = [name for name in found if not name.startswith(".")]
if found:
    newest = max(found, key=lambda name: int(name) if name.isdigit() else 0)
    dcp.load({"app": app}, checkpoint_id=f"checkpoints/{newest}", storage_reader=LazyReader())
    print(f"resumed {app.step}", flush=True)
batch = torch.randn(4, width, generator=torch.Generator().manual_seed(2))
future = None
while app.step < steps:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    app.step += 1
    print(f"step {app.step} loss {loss.item()!r}", flush=True)
    if app.step % 2 == 0:
        name = "last" if "ONE_PLACE" in os.environ else app.step
        if how == "save":
            dcp.save({"app": app}, checkpoint_id=f"checkpoints/{name}", storage_writer=LazyWriter())
        else:
            if future is not None:
                future.result(timeout=300)
            began = time.monotonic()
            future = dcp.async_save(
                {"app": app}, checkpoint_id=f"checkpoints/{name}", storage_writer=LazyWriter(), process_group=group
            )
            print(f"blocked {time.monotonic() - began:.4f}", flush=True)
if future is not None:
    future.result(timeout=300)
dist.destroy_process_group()
