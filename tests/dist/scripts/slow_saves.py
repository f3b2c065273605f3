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
BEGIN_SAVE = ENGINE.begin_save


@functools.wraps(BEGIN_SAVE)
def begin_save(self: Any, files: Any, directory: Path, op: Any) -> PendingSave:
    waited_for.clear()
    pending = BEGIN_SAVE(self, files, directory, op)
    wait = pending.wait

    def wait_longer() -> Any:
        waited_for.wait()
        return wait()

    pending.wait = wait_longer
    return pending


ENGINE.begin_save = begin_save
runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
