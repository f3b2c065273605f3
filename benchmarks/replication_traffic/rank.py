"""One rank: trains as pretrain_gpt.py does, but saves each iteration as the plan says, and computes by waiting."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.replication_traffic.plan import INTERLEAVE, NONE, VARIABLE, Plan, read_plan
from pretrain_gpt import get_batch_pipe, model_provider, pretrain, train_valid_test_datasets_provider
from restart_trace.clock import now_ns

ENTERED_NS = now_ns()
_SAMPLE_S = 0.01
_INTERFACE = "eth0"


def wait_in_passes(compute_s: float, gathered_bytes: int) -> None:
    """Let passes take so much longer, without a processor, as if a device did them, and gather so many bytes of each
    rank of the stage before, as ZeRO-3 gathers weights."""
    import torch
    from deepspeed.runtime.pipe import schedule
    from deepspeed.runtime.pipe.engine import PipelineEngine

    def waiting(method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def waited(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if part.numel():
                group = engine.grid.get_data_parallel_group()
                whole = torch.empty(part.numel() * group.size(), dtype=torch.uint8)
                torch.distributed.all_gather_into_tensor(whole, part, group=group)
            time.sleep(seconds)
            return method(engine, *args, **kwargs)

        return waited

    part = torch.zeros(gathered_bytes, dtype=torch.uint8)
    instructions = PipelineEngine._INSTRUCTION_MAP
    for instruction, seconds in ((schedule.ForwardPass, compute_s), (schedule.BackwardPass, 2 * compute_s)):
        instructions[instruction] = waiting(instructions[instruction], seconds)


def save_as_planned(plan: Plan) -> None:
    """Have each save be of the variant of its iteration."""
    from megatron.checkpointing.manager import Checkpointer

    save = Checkpointer.save

    def planned(self: Checkpointer, engine: Any, progress: Any, **kwargs: Any) -> None:
        variant = plan.variant(progress.iteration)
        checkpoint_engine = self.context.checkpoint_engine
        options = dataclasses.replace(checkpoint_engine.options, copy_steps=1 if variant == INTERLEAVE else None)
        checkpoint_engine.options = options
        if variant != NONE:
            save(self, engine, progress, **kwargs)

    Checkpointer.save = planned


def note_sent_bytes(file: Path) -> None:
    """Until the process ends: a line (monotonic ns, bytes) each 10 ms of what this host has sent (proc(5), net/dev)."""

    def note() -> None:
        with file.open("w") as output:
            while True:
                for line in Path("/proc/self/net/dev").read_text().splitlines():
                    name, _, rest = line.partition(":")
                    if name.strip() == _INTERFACE:
                        output.write(json.dumps([now_ns(), int(rest.split()[8])]) + "\n")
                        output.flush()
                time.sleep(_SAMPLE_S)

    threading.Thread(target=note, daemon=True).start()


def main() -> int:
    plan = read_plan(Path(os.environ[VARIABLE]))
    wait_in_passes(plan.compute_s, plan.gathered_bytes)
    save_as_planned(plan)
    if os.environ["LOCAL_RANK"] == "0":
        note_sent_bytes(Path(plan.directory) / f"sent_{os.environ['RANK']}.jsonl")
    return pretrain(train_valid_test_datasets_provider, model_provider, get_batch_pipe, entered_ns=ENTERED_NS)


if __name__ == "__main__":
    raise SystemExit(main())
