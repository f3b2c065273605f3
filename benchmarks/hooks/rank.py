"""One rank of the measurement: a plain DeepSpeed engine that saves, loads and steps with and without hooks, in turns.

    rank.py plan.json       {"directory", "output", "rounds", "width", "steps", "ranks"}

torch.save and torch.load are replaced under two names, of which DeepSpeed uses torch's: both are switched.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VARIANTS = ("untraced", "traced", "control")  # control: untraced once more, to show the noise
_REPEATS = 20_000


class Within:
    """Processor time of the training thread within hooks, how often they are called, and records that are written.

    Each reading of the clock is counted to the hooks: what they cost without it is less.
    """

    def __init__(self) -> None:
        from restart_trace.hooks.guard import Hook
        from restart_trace.sink import JsonlSink

        self.seconds, self.calls, self.records = 0.0, 0, 0
        enter, leave, write = Hook.enter, Hook.leave, JsonlSink.write

        def timed_enter(hook: Any, call: Any) -> Any:
            started = time.thread_time()
            manager = enter(hook, call)
            self.calls += 1
            self.seconds += time.thread_time() - started
            return manager

        def timed_leave(hook: Any, manager: Any, error: BaseException | None) -> None:
            started = time.thread_time()
            leave(hook, manager, error)
            self.seconds += time.thread_time() - started

        def counted(sink: Any, record: dict[str, Any]) -> bool:
            self.records += 1
            return write(sink, record)

        Hook.enter, Hook.leave, JsonlSink.write = timed_enter, timed_leave, counted  # type: ignore[method-assign]


def unit_costs(directory: Path) -> dict[str, float]:
    """Processor time, s, of a hooked call that records nothing, and of a record."""
    from restart_trace.hooks.guard import wrap
    from restart_trace.recorder import Recorder
    from restart_trace.sink import JsonlSink

    @contextmanager
    def around(call: Any) -> Iterator[None]:
        yield

    def spent(work: Callable[[], Any]) -> float:
        started = time.thread_time()
        for _ in range(_REPEATS):
            work()
        return (time.thread_time() - started) / _REPEATS

    owner = SimpleNamespace(__name__="owner", f=lambda: None)
    plain_s = spent(owner.f)
    wrap(owner, "f", around)
    recorder = Recorder(JsonlSink(directory), {})
    operation = recorder.begin("save")
    record_s = spent(lambda: operation.add("flush", "write", 1, 2, file="mp_rank_00_model_states.pt", num_bytes=3))
    recorder.close()
    return {"call_s": spent(owner.f) - plain_s, "record_s": record_s}


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
    unit = unit_costs(directory / f"unit_{dist.get_rank()}.jsonl")
    within = Within()
    families = _work(plan, directory)

    def put(hooks: bool) -> None:
        guard.put(hooks)
        torch.save, torch.load = torch.serialization.save, torch.serialization.load

    turns = random.Random(0)  # every rank takes them in the same order
    with Path(f"{plan['output']}.{dist.get_rank()}").open("w") as output:
        output.write(json.dumps({"family": "unit", "variant": "cost", **unit}) + "\n")
        for number in range(-1, plan["rounds"]):  # the first is a warm-up
            for family, work in families.items():
                for variant in turns.sample(VARIANTS, len(VARIANTS)):
                    put(variant == "traced")
                    dist.barrier()
                    before = within.seconds, within.calls, within.records
                    started, cpu = time.perf_counter(), time.process_time()
                    work()
                    sample = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
                    sample["hooks_s"] = within.seconds - before[0]
                    sample |= {"calls": within.calls - before[1], "records": within.records - before[2]}
                    if number >= 0:
                        output.write(json.dumps({"family": family, "variant": variant, **sample}) + "\n")
    dist.destroy_process_group()


def _work(plan: dict[str, Any], directory: Path) -> dict[str, Callable[[], None]]:
    """What is measured, by its name."""
    import deepspeed
    import torch

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

    def steps() -> None:
        for _ in range(plan["steps"]):
            engine.backward(engine(row).float().square().mean())
            engine.step()

    def save() -> None:
        engine.save_checkpoint(str(directory / "checkpoints"), tag="measured")

    def load() -> None:
        engine.load_checkpoint(str(directory / "checkpoints"), tag="measured")

    return {f"{plan['steps']} steps": steps, "save": save, "load": load}


if __name__ == "__main__":
    main()
