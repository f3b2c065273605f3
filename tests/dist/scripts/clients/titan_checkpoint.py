# type: ignore  (as users write it)
"""An FSDP2 training whose checkpoints torchtitan's CheckpointManager writes; it knows nothing of being traced.

torchrun ... titan_checkpoint.py disabled|async STEPS

It goes on from the newest checkpoint in ./checkpoint, and saves at each second step, as torchtitan's trainer does.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager


class Optimizers(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state_dict):
        set_optimizer_state_dict(self.model, self.optimizer, state_dict)


class TrainState(Stateful):
    step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict):
        self.step = int(state_dict["step"])


mode, steps = sys.argv[1], int(sys.argv[2])
width = int(os.environ.get("WIDTH", "1024"))
dist.init_process_group("cpu:gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train_state = TrainState()
manager = CheckpointManager(
    CheckpointManager.Config(enable=True, interval=2, async_mode=mode, last_save_model_only=False, keep_latest_k=0),
    dataloader=None,
    model_parts=[model],
    optimizers=Optimizers(model, optimizer),
    lr_schedulers=None,
    states={"train_state": train_state},
    sd_adapter=None,
)
began = time.monotonic_ns()
if manager.load():
    print("load", began, time.monotonic_ns())
batch = torch.randn(1, width, generator=torch.Generator().manual_seed(2))
while train_state.step < steps:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    train_state.step += 1
    print(f"step {train_state.step} loss {loss.item()!r}", flush=True)
    began = time.monotonic_ns()
    if manager.save(train_state.step):
        if mode == "async":
            print("returned", began, time.monotonic_ns())
            manager.maybe_wait_for_saving()
        print("save", began, time.monotonic_ns())
manager.close()
dist.destroy_process_group()
