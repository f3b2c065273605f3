"""Program of test_memory_engine.py: a launcher that kills its rank while it saves, and looks at what is left.

Each rank saves states that hold nothing but their step, goes on from the step that it finds, and tells by a pipe which
steps are whole. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any

import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState
from megatron.checkpointing.engines.memory.engine import MemoryEngine
from megatron.peers.memory_slots import Slot, held_slots, hold_slots
from megatron.processes.parent_process import end_with_parent
from restart_trace.recorder import untraced_operation

NAME = "layer_01-model_00-model_states.pt"
ELEMENTS = 1 << 20


def engine() -> MemoryEngine:
    return MemoryEngine(EngineOptions(io_block_bytes=256 * 1024, io_threads=2, host_cache_bytes=1 << 24))


def state_of(step: int) -> list[FileState]:
    return [FileState(NAME, {"weights": torch.full((ELEMENTS,), float(step)), "step": step})]


def newest_of(mine: MemoryEngine) -> int:
    """Newest step that is whole; every save that counts as whole must be so, to the last bit."""
    steps = [0]
    for kept in mine.memory_saves():
        found = mine.load([NAME], kept.checkpoint, untraced_operation())[NAME]
        step = kept.record["step"]
        assert found["step"] == step, f"step {found['step']} where {step} was saved"
        assert torch.equal(found["weights"], torch.full((ELEMENTS,), float(step))), f"step {step} is torn"
        steps.append(step)
    return max(steps)


def save_for_ever(told: int) -> None:
    mine = engine()
    step = newest_of(mine)
    mine.keep(str(step) if step else None)
    while True:
        step += 1
        pending = mine.begin_memory_save(state_of(step), {"save": str(step), "step": step}, None, untraced_operation())
        if step % 2:
            pending.release_state()
        pending.wait()
        mine.settle()
        os.write(told, step.to_bytes(8, "little"))


def fork(work: Any) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            end_with_parent(parent)
            work()
            code = 0
        except BaseException as exc:
            print(f"{type(exc).__name__}: {exc}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return pid


def torn(slots: list[Slot]) -> bool:
    """Whether one is being written, or was when its rank ended."""
    return any(slot.record() is None for slot in slots)


def one_kill(slots: list[Slot], generator: random.Random, in_a_save: bool) -> tuple[int, bool]:
    """(newest step that the rank told of, whether it was killed while it wrote a slot)."""
    reader, writer = os.pipe()
    rank = fork(lambda: save_for_ever(writer))
    os.close(writer)
    told = [os.read(reader, 8), os.read(reader, 8)]
    assert all(told), "the rank ended by itself"
    if in_a_save:
        while not torn(slots):
            pass
    else:
        time.sleep(generator.random() / 50)
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    while more := os.read(reader, 8):
        told.append(more)
    os.close(reader)
    return int.from_bytes(told[-1], "little"), torn(slots)


def main() -> None:
    kills, seed = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    hold_slots(1)
    ((*slots,),) = held_slots() or [[]]
    generator, hit = random.Random(seed), 0

    def verify(told: int) -> None:
        found = newest_of(engine())
        assert told <= found <= told + 1, f"step {told} was whole, and {found} is the newest that is left"

    for number in range(kills):
        told, was_torn = one_kill(slots, generator, in_a_save=number % 2 == 0)
        hit += was_torn
        code = os.waitstatus_to_exitcode(os.waitpid(fork(lambda told=told: verify(told)), 0)[1])
        if code:
            raise SystemExit(f"after kill {number}: see above")
    print(json.dumps({"kills": kills, "while_writing": hit, "newest": told}))


if __name__ == "__main__":
    main()
