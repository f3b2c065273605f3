# type: ignore  (as users write it)
"""A DDP training with snapshots, as PyTorch's fault-tolerance tutorial shows it; it knows nothing of being traced.

torchrun ... ddp_snapshot.py path|file|thread STEPS

Rank 0 writes snapshot.pt at each second step (SAVE_EVERY): to the path, into an open file, or in a thread. All ranks
start from it.
"""

import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler


class Trainer:
    def __init__(self, model, data, optimizer, how):
        self.data, self.optimizer, self.how = data, optimizer, how
        self.steps_run, self.writer = 0, None
        if os.path.exists("snapshot.pt"):
            self.load_snapshot(model)
        self.model = DDP(model)

    def load_snapshot(self, model):
        began = time.monotonic_ns()
        if self.how == "file":
            with open("snapshot.pt", "rb") as file:
                snapshot = torch.load(file, map_location="cpu")
        else:
            snapshot = torch.load("snapshot.pt", map_location="cpu")
        print("load", began, time.monotonic_ns())
        model.load_state_dict(snapshot["MODEL_STATE"])
        self.optimizer.load_state_dict(snapshot["OPTIMIZER_STATE"])
        self.steps_run = snapshot["STEPS_RUN"]
        print(f"Resuming training from snapshot at step {self.steps_run}")

    def save_snapshot(self):
        state = {
            "MODEL_STATE": self.model.module.state_dict(), "OPTIMIZER_STATE": self.optimizer.state_dict(),
            "STEPS_RUN": self.steps_run,
        }  # fmt: skip
        began = time.monotonic_ns()
        if self.how == "path":
            torch.save(state, "snapshot.pt")
        elif self.how == "file":
            with open("snapshot.pt", "wb") as file:
                torch.save(state, file)
        else:
            self.writer = threading.Thread(target=torch.save, args=(state, "snapshot.pt"))
            self.writer.start()
            self.writer.join()
        print("save", began, time.monotonic_ns())

    def train(self, steps):
        for number, batch in enumerate(self.data):
            if number < self.steps_run:
                continue
            if self.steps_run == steps:
                break
            self.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.model(batch), batch)
            loss.backward()
            self.optimizer.step()
            self.steps_run += 1
            print(f"step {self.steps_run} loss {loss.item()!r}", flush=True)
            if os.environ.get("FAIL_AT") == f"{self.steps_run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}":
                sys.exit(7)
            if dist.get_rank() == 0 and self.steps_run % save_every == 0:
                self.save_snapshot()


how, steps = sys.argv[1], int(sys.argv[2])
width = int(os.environ.get("WIDTH", "1024"))
save_every = int(os.environ.get("SAVE_EVERY", "2"))
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
dataset = torch.randn(max(16, 2 * steps), width, generator=torch.Generator().manual_seed(2))
data = DataLoader(dataset, batch_size=1, sampler=DistributedSampler(dataset, shuffle=False))
Trainer(model, data, optimizer, how).train(steps)
dist.destroy_process_group()
