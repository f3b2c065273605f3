# type: ignore  (as users write it: DeepSpeed and Transformers are not annotated throughout)
"""A DeepSpeed training as one would write it: it knows nothing of being traced.

    torchrun ... plain_deepspeed.py ordinary|pipeline STEPS

It goes on from the newest checkpoint in ./checkpoints, and reads its last one back.
"""

import json
import os
import sys
import time

import deepspeed
import torch
from deepspeed.pipe import PipelineModule


def timed(what, function):
    began = time.monotonic_ns()
    function("checkpoints")
    print(what, began, time.monotonic_ns())


kind, steps = sys.argv[1], int(sys.argv[2])
width = int(os.environ.get("WIDTH", "1024"))
config = {
    "train_batch_size": 4, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}, "bf16": {"enabled": True},
    "checkpoint": json.loads(os.environ.get("CHECKPOINT", "{}")),
}  # fmt: skip
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled for half a minute
deepspeed.init_distributed("gloo")
torch.manual_seed(1)
layers = [torch.nn.Linear(width, width) for _ in range(4)]
if kind == "pipeline":
    model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    config["train_batch_size"] = 2
else:
    model = torch.nn.Sequential(*layers)
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
timed("load", engine.load_checkpoint)
data = torch.randn(2, width, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(2)).split(1)
while engine.global_steps < steps:
    if kind == "pipeline":
        loss = engine.train_batch(iter([(row, row) for row in data]))
    else:
        for row in data:
            loss = torch.nn.functional.mse_loss(engine(row), row)
            engine.backward(loss)
            engine.step()
    print(f"step {engine.global_steps} loss {loss.item()!r}", flush=True)
    if os.environ.get("FAIL_AT") == f"{engine.global_steps}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}":
        sys.exit(7)
    if engine.global_steps % 2 == 0:
        timed("save", engine.save_checkpoint)
timed("load", engine.load_checkpoint)
torch.distributed.destroy_process_group()
