"""pretrain_gpt.py whose --save another launch takes over when the last save of this one is over."""

from __future__ import annotations

import runpy
from pathlib import Path

from megatron.checkpointing.manager import Checkpointer
from megatron.checkpointing.store.ownership import claim

CLOSE = Checkpointer.close


def close_and_lose(self: Checkpointer, *, after_error: bool = False) -> None:
    CLOSE(self, after_error=after_error)
    claim(Path(self.context.config.checkpoint.save or ""), take_over=True).release()


Checkpointer.close = close_and_lose

runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
