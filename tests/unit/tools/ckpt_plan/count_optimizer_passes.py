"""Prints, as JSON, the bytes per parameter that DeepSpeed's bf16 optimizer moves through memory on one CPU rank.

`micro_batch`: of a backward pass beside its products; `reduction`: of one replica, without the collective; `step`: of a
rank that updates all parameters; `operators`: names of torch's operators of all three. "immediate": with
bf16.immediate_grad_update, "kept": without. The calls are those of DeepSpeed's PipelineEngine.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}

import deepspeed.comm
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron.net.free_port import free_port
from tools.ckpt_plan.step_time.passes import PassRecorder

WIDTH = 1024


def main() -> None:
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())
    # Builds an operator of DeepSpeed otherwise, which one rank does not need.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.init_distributed("gloo", verbose=False)
    print(json.dumps({name: count(name == "immediate") for name in ("immediate", "kept")}))


def count(immediate_grad_update: bool) -> dict[str, Any]:
    group = torch.distributed.group.WORLD
    layer = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    adam = torch.optim.Adam(layer.parameters(), fused=True, decoupled_weight_decay=True)
    optimizer = BF16_Optimizer(
        adam, {layer.weight: "weight"}, SimpleNamespace(enabled=True, immediate_grad_update=immediate_grad_update),
        clip_grad=1e-6, dp_process_group=group, grad_acc_dtype=torch.float32,
    )  # fmt: skip
    # What the reduction reads of the engine: one replica, the gradients' own type, and DeepSpeed's defaults.
    engine: Any = SimpleNamespace(
        communication_data_type=torch.float32, gradient_average=True, postscale_gradients=lambda: True,
        gradient_predivide_factor=lambda: 1.0, flatten=_flatten_dense_tensors, unflatten=_unflatten_dense_tensors,
    )  # fmt: skip
    engine.allreduce_bucket = DeepSpeedEngine.allreduce_bucket.__get__(engine)
    engine.allreduce_and_copy = DeepSpeedEngine.allreduce_and_copy.__get__(engine)

    def micro_batch() -> None:
        optimizer.clear_lp_grads()
        layer(torch.ones(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
        optimizer.update_hp_grads(clear_lp_grads=False)

    def reduction() -> None:
        buffers, _ = optimizer.get_grads_for_reduction()
        DeepSpeedEngine.allreduce_no_retain(engine, buffers, dp_group=group, numel_per_bucket=1)

    found: dict[str, Any] = {}
    operators: set[str] = set()
    for _ in range(2):  # of the second iteration: in the first, .grad and moments do not exist yet
        for name, call in (("micro_batch", micro_batch), ("reduction", reduction), ("step", optimizer.step)):
            with PassRecorder() as recorder:
                call()
            moved = sum(each.num_bytes for each in recorder.passes if each.kind == "memory")
            found[name] = moved / layer.weight.numel()
            operators |= {each.name for each in recorder.passes if each.kind == "memory"}
    found["operators"] = sorted(operators)
    return found


if __name__ == "__main__":
    main()
