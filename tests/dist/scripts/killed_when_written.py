"""pretrain_gpt.py whose rank KILL_RANK is killed in the save of iteration KILL_STEP: its files are written, and it has
told nobody so. KILL_ENGINE is the engine that it saves with. With HANG it is not killed, and tells nobody all the same.
"""

from __future__ import annotations

import functools
import os
import runpy
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.checkpointing.engines.base import PendingSave
from megatron.checkpointing.engines.registry import engine_class

TAG = f"global_step{os.environ['KILL_STEP']}"
ENGINE: Any = engine_class(os.environ["KILL_ENGINE"])


def kill_after(act: Callable[..., Any], directory: Path) -> Callable[..., Any]:
    """`act`, and then nothing any more, if it writes the chosen checkpoint."""

    def act_and_die(*arguments: Any) -> Any:
        result = act(*arguments)
        if f"{TAG}_" in directory.name:
            if "HANG" in os.environ:
                threading.Event().wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return act_and_die


def arm() -> None:
    name = "begin_memory_save" if ENGINE.keeps_in_memory else "begin_save"
    begin_save, save = getattr(ENGINE, name), ENGINE.save

    @functools.wraps(begin_save)
    def begin_and_die_when_written(self: Any, *arguments: Any) -> PendingSave:
        pending = begin_save(self, *arguments)
        pending.wait = kill_after(pending.wait, arguments[-2])
        return pending

    @functools.wraps(save)
    def save_and_die(self: Any, files: Any, directory: Path, op: Any) -> Any:
        return kill_after(functools.partial(save, self), directory)(files, directory, op)

    if ENGINE.asynchronous:
        setattr(ENGINE, name, begin_and_die_when_written)
    else:
        ENGINE.save = save_and_die


if os.environ["RANK"] == os.environ["KILL_RANK"]:
    arm()
runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
