"""A DeepSpeed training as one would write it: it knows nothing of being traced.

    torchrun ... plain_deepspeed.py ordinary|pipeline SAVE_DIR STEPS
"""

import os
import sys

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

kind, save_dir, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
CONFIG = {
    "train_batch_size": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}, "bf16": {"enabled": True},
}  # fmt: skip
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for half a minute
deepspeed.init_distributed("gloo")
torch.manual_seed(1)
layers = [torch.nn.Linear(256, 256) for _ in range(4)]
if kind == "pipeline":
    model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    CONFIG["train_batch_size"] = 2
else:
    model = torch.nn.Sequential(*layers)
engine, *_ = deepspeed.initialize(model=model, config=CONFIG, model_parameters=model.parameters())
engine.load_checkpoint(save_dir)
data = torch.randn(2, 256, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2)).split(1)
while engine.global_steps < steps:
    if kind == "pipeline":
        loss = engine.train_batch(iter([(row, row) for row in data]))
    else:
        for row in data:
            loss = torch.nn.functional.mse_loss(engine(row), row)
            engine.backward(loss)
            engine.step()
    print(f"rank {os.environ['RANK']} step {engine.global_steps} loss {loss.item()!r}", flush=True)
    if engine.global_steps % 2 == 0:
        engine.save_checkpoint(save_dir)
torch.distributed.destroy_process_group()
