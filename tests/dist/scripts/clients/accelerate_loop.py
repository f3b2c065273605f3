# type: ignore  (as users write it: DeepSpeed and Transformers are not annotated throughout)
"""A training loop with Accelerate and DeepSpeed, as its documentation shows it; it knows nothing of being traced.

torchrun ... accelerate_loop.py STEPS
"""

import os
import sys
import time

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, set_seed

steps = int(sys.argv[1])
width = int(os.environ.get("WIDTH", "1024"))
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for half a minute
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
set_seed(1)
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader(torch.randn(8, width, dtype=torch.bfloat16), batch_size=1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for step, batch in enumerate(data, 1):
    loss = torch.nn.functional.mse_loss(model(batch), batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item()!r}", flush=True)
    if step == steps:
        break
for what, function in (("save", accelerator.save_state), ("load", accelerator.load_state)):
    began = time.monotonic_ns()
    function("checkpoints/state")
    print(what, began, time.monotonic_ns())
accelerator.end_training()
