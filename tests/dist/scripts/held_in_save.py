"""pretrain_gpt.py whose rank 0 waits, to be killed, where the record that begins HOLD_STAGE of a save is in its trace.

HOLD_STAGE is one of those of tests/dist/save_stages.py. With HOLD_SAVE=2 it is the second save of this launch that is
held. The rank's other threads go on.
"""

from __future__ import annotations

import os
import runpy
import threading
from pathlib import Path
from typing import Any

from restart_trace import recorder
from tests.dist.save_stages import stage_after

WRITE = recorder.Recorder.write


def arm() -> None:
    stage, nth = os.environ["HOLD_STAGE"], int(os.environ["HOLD_SAVE"])
    saves: list[int] = []  # their operations' numbers

    def write_and_wait(self: recorder.Recorder, record_type: str, **fields: Any) -> None:
        WRITE(self, record_type, **fields)
        if record_type == "operation_begin" and fields["operation"] == "save":
            saves.append(fields["op"])
        if len(saves) < nth or fields.get("op") != saves[nth - 1]:
            return
        if stage_after({"type": record_type, "operation": "save", **fields}) == stage:
            threading.Event().wait()

    recorder.Recorder.write = write_and_wait  # type: ignore[method-assign]


if os.environ["RANK"] == "0":
    arm()
runpy.run_path(str(Path(__file__).resolve().parents[3] / "pretrain_gpt.py"), run_name="__main__")
