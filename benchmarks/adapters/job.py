"""A training of one rank that saves in several ways, one after the other: job.py dcp|deepspeed PLAN.

PLAN is JSON: directory, layers, width, batch, rounds. Prints a line of JSON for each save: variant, bytes, `call_s`
(the save's own call), `hook_s` (what the next step of the optimizer waits for it), `durable_s` (from the call to the
end of the save), `step_s` (of the step before the save).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

# The adapters' hook is registered between these two, as they are imported, and called between them.
_moments: list[float] = [0.0, 0.0]


def _note(index: int) -> Callable[..., None]:
    def note(*_: Any) -> None:
        _moments[index] = time.monotonic()

    return note


register_optimizer_step_pre_hook(_note(0))

import megatron.adapters.snapshot  # noqa: E402, F401
from benchmarks.adapters.timing import Save, timed  # noqa: E402

register_optimizer_step_pre_hook(_note(1))

TORCH, LAZY = "torch.save + fsync", "lazy"


def synced(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def model_of(plan: dict[str, Any]) -> torch.nn.Sequential:
    return torch.nn.Sequential(*[torch.nn.Linear(plan["width"], plan["width"]) for _ in range(plan["layers"])])


def dcp_job(plan: dict[str, Any]) -> tuple[Callable[[], None], dict[str, Save]]:
    """(a step, the ways to save)"""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import async_save
    from torch.distributed.fsdp import fully_shard

    from megatron.adapters.dcp import LazyWriter

    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    model = model_of(plan)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(plan["batch"], plan["width"])

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optim": moments}

    def by_torch(directory: Path) -> Callable[[], bool]:
        directory.mkdir()
        torch.save(state(), directory / "state.pt")
        synced(directory / "state.pt")
        synced(directory)
        return lambda: True

    def by(writer: Callable[[], Any]) -> Save:
        def begin(directory: Path) -> Callable[[], bool]:
            arguments: dict[str, Any] = {"storage_writer": writer(), "process_group": group}
            saving: Any = async_save(state(), checkpoint_id=directory, **arguments)
            return lambda: saving.done() and saving.result() is not None

        return begin

    # The library's writer wants its directory at once; checkpoint_id replaces it. It calls fsync on each file.
    return step, {
        TORCH: by_torch, "dcp.async_save": by(lambda: FileSystemWriter(plan["directory"])), LAZY: by(LazyWriter)
    }  # fmt: skip


def deepspeed_job(plan: dict[str, Any]) -> tuple[Callable[[], None], dict[str, Save]]:
    """(a step, the ways to save)"""
    import deepspeed
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    import megatron.adapters.deepspeed  # noqa: F401

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo")
    config = {
        "train_batch_size": plan["batch"], "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "checkpoint": {"engine": {"type": "lazy"}},
    }  # fmt: skip
    model = model_of(plan)
    parameters: Any = model.parameters()
    engine: Any = deepspeed.initialize(model=model, config=config, model_parameters=parameters)[0]
    ways = {TORCH: TorchCheckpointEngine(engine._config), LAZY: engine.checkpoint_engine}
    batch = torch.randn(plan["batch"], plan["width"], dtype=torch.bfloat16)

    def step() -> None:
        engine.backward(torch.nn.functional.mse_loss(engine(batch), batch))
        engine.step()

    def begin(name: str) -> Save:
        def save(directory: Path) -> Callable[[], bool]:
            engine.checkpoint_engine = ways[name]
            engine.save_checkpoint(str(directory), tag="tag")
            if name == TORCH:
                for path in sorted(directory.rglob("*"), reverse=True):
                    synced(path)
                synced(directory)
            return (directory / "latest").exists

        return save

    return step, {name: begin(name) for name in ways}


def main() -> None:
    plan = json.loads(sys.argv[2])
    place = Path(plan["directory"])
    step, ways = (dcp_job if sys.argv[1] == "dcp" else deepspeed_job)(plan)
    step()
    names = list(ways)
    for number in range(plan["rounds"] + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = time.monotonic()
            step()
            step_s = time.monotonic() - began
            directory = place / f"{number}_{name.split()[0]}"
            times = timed(ways[name], directory, step)
            size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            shutil.rmtree(directory)
            sample = {"variant": name, "bytes": size, **times, "hook_s": _moments[1] - _moments[0], "step_s": step_s}
            if number:  # the first of each allocates its memory
                print(json.dumps(sample), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
