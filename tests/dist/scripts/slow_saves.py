"""pretrain_gpt.py with SLOW_ENGINE, an asynchronous engine, that says SLOW_S seconds late that a save is done."""

from __future__ import annotations

import functools
import os
import runpy
import time
from pathlib import Path
from typing import Any

from megatron.checkpoint_engines.base import PendingSave
from megatron.checkpoint_engines.registry import engine_class

ENGINE: Any = engine_class(os.environ["SLOW_ENGINE"])
BEGIN_SAVE = ENGINE.begin_save


@functools.wraps(BEGIN_SAVE)
def begin_save(self: Any, files: Any, directory: Path, op: Any) -> PendingSave:
    pending = BEGIN_SAVE(self, files, directory, op)
    wait = pending.wait

    def wait_longer() -> Any:
        time.sleep(float(os.environ["SLOW_S"]))
        return wait()

    pending.wait = wait_longer
    return pending


ENGINE.begin_save = begin_save
runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
