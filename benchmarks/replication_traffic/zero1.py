"""One rank: trains as pretrain_gpt.py does, but saves each iteration as the plan says, and computes by waiting."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.replication_traffic.plan import NONE, VARIABLE, Plan, read_plan
from benchmarks.replication_traffic.ranks import note_sent_bytes, set_variant
from pretrain_gpt import get_batch_pipe, model_provider, pretrain, train_valid_test_datasets_provider
from restart_trace.clock import now_ns

ENTERED_NS = now_ns()


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
        set_variant(self.context.checkpoint_engine, variant)
        if variant != NONE:
            save(self, engine, progress, **kwargs)

    Checkpointer.save = planned


def main() -> int:
    plan = read_plan(Path(os.environ[VARIABLE]))
    wait_in_passes(plan.compute_s, plan.gathered_bytes)
    save_as_planned(plan)
    if os.environ["LOCAL_RANK"] == "0":
        note_sent_bytes(Path(plan.directory) / f"sent_{os.environ['RANK']}.jsonl")
    return pretrain(train_valid_test_datasets_provider, model_provider, get_batch_pipe, entered_ns=ENTERED_NS)


if __name__ == "__main__":
    raise SystemExit(main())
