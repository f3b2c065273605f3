"""One rank of the measurement: a plain DeepSpeed engine that saves, loads and steps with and without hooks, in turns.

    rank.py plan.json       {"directory", "output", "rounds", "width", "steps", "ranks"}

torch.save and torch.load are replaced under two names, of which DeepSpeed uses torch's: both are switched.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIANTS = ("untraced", "traced", "control")  # control: untraced once more, to show the noise


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    import deepspeed
    import torch
    import torch.distributed as dist

    import restart_trace.hooks
    from restart_trace.hooks import guard

    directory = Path(plan["directory"])
    restart_trace.hooks.install(directory / "trace")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1)
    width = plan["width"]
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)])
    config = {
        "train_batch_size": plan["ranks"], "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }  # fmt: skip
    parameters: Any = list(model.parameters())  # annotated as a Module in DeepSpeed
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=parameters)
    row = torch.randn(1, width, dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(plan["steps"]):
            engine.backward(engine(row).float().square().mean())
            engine.step()

    def save() -> None:
        engine.save_checkpoint(str(directory / "checkpoints"), tag="measured")

    def load() -> None:
        engine.load_checkpoint(str(directory / "checkpoints"), tag="measured")

    def put(hooks: bool) -> None:
        guard.put(hooks)
        torch.save, torch.load = torch.serialization.save, torch.serialization.load

    turns = random.Random(0)  # every rank takes them in the same order
    families: dict[str, Callable[[], None]] = {"step": step, "save": save, "load": load}
    with Path(f"{plan['output']}.{dist.get_rank()}").open("w") as output:
        for number in range(-1, plan["rounds"]):  # the first is a warm-up
            for family, work in families.items():
                for variant in turns.sample(VARIANTS, len(VARIANTS)):
                    put(variant == "traced")
                    dist.barrier()
                    started = time.perf_counter()
                    work()
                    sample: dict[str, Any] = {"family": family, "variant": variant, "round": number}
                    if number >= 0:
                        output.write(json.dumps(sample | {"wall_s": time.perf_counter() - started}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
