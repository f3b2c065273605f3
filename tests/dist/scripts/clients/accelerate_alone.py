# type: ignore  (as users write it)
"""A training loop with Accelerate and DDP, as its documentation shows it; it knows nothing of being traced.

torchrun ... accelerate_alone.py STEPS

It goes on from ./checkpoint if that is there, skips the batches that it has seen, and saves once at its end.
"""

import os
import sys
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

steps = int(sys.argv[1])
width = int(os.environ.get("WIDTH", "1024"))
accelerator = Accelerator(cpu=True)
set_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader(torch.randn(max(16, 2 * steps), width), batch_size=1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
first = 0
if os.path.isdir("checkpoint"):
    began = time.monotonic_ns()
    accelerator.load_state("checkpoint")
    print("load", began, time.monotonic_ns())
    first = 2
    data = accelerator.skip_first_batches(data, first)
for step, batch in enumerate(data, first + 1):
    loss = torch.nn.functional.mse_loss(model(batch), batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step == steps:
        break
began = time.monotonic_ns()
accelerator.save_state("checkpoint")
print("save", began, time.monotonic_ns())
accelerator.end_training()
