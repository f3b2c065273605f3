"""Ranks that wait for faults, so that no test depends on how fast they train.

HELD_CYCLES: in how many launches of a job its ranks wait. The others train to their end.
HELD_AFTER: so many iterations after its start (13 if unset, two saves of five and some more), and again after as many,
    a rank waits until the drill has injected a fault into its launch once more; for ever where no drill does.
HELD_RANKS: which ranks wait, as "0,1" (all if unset). The others go on, and wait for these in their next collective.

`held_environment` makes the ranks of a program wait that is started with it (by scripts/held/sitecustomize.py),
scripts/held_training.py those of the zygote. With FORKED_WRITERS such ranks fork their writers (forked_writers.py).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.dist import forked_writers
from tests.dist.forked_writers import FORKED_WRITERS

HELD = Path(__file__).with_name("scripts") / "held"
HELD_TRAINING = str(HELD.with_name("held_training.py"))


def held_environment(cycles: int, after: int = 13) -> dict[str, str]:
    """Variables of a command whose ranks are to wait. Its reference run does not."""
    path = os.environ.get("PYTHONPATH")
    return {
        "HELD_CYCLES": str(cycles),
        "HELD_AFTER": str(after),
        "PYTHONPATH": f"{HELD}{os.pathsep}{path}" if path else str(HELD),
    }


def patch(training: Any) -> None:
    """Have the training of this process wait; `training` is the module megatron.training.trainer."""
    if FORKED_WRITERS in os.environ:
        forked_writers.install()
    train_step, trained = training._train_step, 0
    after = int(os.environ.get("HELD_AFTER", "13"))

    def held_step(trainer: Any, loop_start: int) -> None:
        nonlocal trained
        if trained and trained % after == 0:
            wait_for_faults(trained // after)
        trained += 1
        train_step(trainer, loop_start)

    training._train_step = held_step


def wait_for_faults(count: int) -> None:
    """Return once this launch has had `count` faults, or at once if no fault is to come."""
    trace = trace_directory()
    cycle = len(list(trace.glob(f"rank_{int(os.environ['RANK']):05d}_cycle_*.jsonl"))) - 1
    if cycle >= int(os.environ["HELD_CYCLES"]) or "reference" in trace.parts:
        return
    if os.environ["RANK"] not in os.environ.get("HELD_RANKS", os.environ["RANK"]).split(","):
        return
    while faults(trace, cycle) < count:
        time.sleep(0.01)


def trace_directory() -> Path:
    for flag, below in (("--restart-trace-dir", "."), ("--save", "restart_trace")):
        if flag in sys.argv:
            return Path(sys.argv[len(sys.argv) - sys.argv[::-1].index(flag)], below)
    raise AssertionError("a held training needs --restart-trace-dir or --save")


def faults(trace: Path, cycle: int) -> int:
    """Number of faults that the drill has recorded for this launch."""
    lines = [line for path in trace.glob("supervisor*.jsonl") for line in path.read_bytes().split(b"\n")[:-1]]
    found = map(json.loads, lines)
    return sum(r.get("phase") == "injected" and r.get("cycle") == cycle for r in found)


def note_waits() -> threading.Event:
    """An event that is set when training waits for an asynchronous save: for one at a time, so clear it before each."""
    from restart_trace.recorder import Operation

    waited_for, span = threading.Event(), Operation.span

    def noting_span(self: Operation, phase: str, *args: Any, **kwargs: Any) -> Any:
        if phase in ("wait_previous", "barrier") and threading.current_thread() is threading.main_thread():
            waited_for.set()
        return span(self, phase, *args, **kwargs)

    Operation.span = noting_span
    return waited_for
