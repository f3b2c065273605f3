"""pretrain_gpt.py with SLOW_ENGINE, an asynchronous engine: no save of it is done before training waits for it."""

from __future__ import annotations

import functools
import os
import runpy
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.base import PendingSave
from megatron.checkpointing.engines.registry import engine_class
from tests.dist.hold import note_waits

waited_for = note_waits()
ENGINE: Any = engine_class(os.environ["SLOW_ENGINE"])
NAME = "begin_memory_save" if ENGINE.keeps_in_memory else "begin_save"
BEGIN_SAVE = getattr(ENGINE, NAME)


@functools.wraps(BEGIN_SAVE)
def begin_save(self: Any, *arguments: Any) -> PendingSave:
    waited_for.clear()
    pending = BEGIN_SAVE(self, *arguments)
    wait = pending.wait

    def wait_longer() -> Any:
        waited_for.wait()
        return wait()

    pending.wait = wait_longer
    return pending


setattr(ENGINE, NAME, begin_save)
runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
