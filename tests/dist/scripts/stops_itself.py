"""pretrain_gpt.py in which one rank stops itself, as by SIGSTOP from outside, when it comes to a known point.

STOPPED_RANK: which rank. STOPPED_IN: operation and phase of the trace ("save serialize"), at whose first span it stops;
or "step N": when it has recorded that iteration.
"""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from restart_trace.recorder import Operation, Recorder

ROOT = Path(__file__).resolve().parents[3]
WHERE = os.environ["STOPPED_IN"]


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def install() -> None:
    span, iteration, begin = Operation.span, Recorder.iteration, Recorder.begin
    names: dict[int, str] = {}

    def noting_begin(self: Recorder, name: str, *args: Any, **kwargs: Any) -> Operation:
        operation = begin(self, name, *args, **kwargs)
        names[id(operation)] = name
        return operation

    def stopping_span(self: Operation, phase: str, *args: Any, **kwargs: Any) -> Any:
        if f"{names.get(id(self))} {phase}" == WHERE:
            stop()
        return span(self, phase, *args, **kwargs)

    def stopping_iteration(self: Recorder, step: int, *args: Any, **kwargs: Any) -> None:
        iteration(self, step, *args, **kwargs)
        if f"step {step}" == WHERE:
            stop()

    Recorder.begin, Operation.span, Recorder.iteration = noting_begin, stopping_span, stopping_iteration


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["STOPPED_RANK"]:
        install()
    runpy.run_path(str(ROOT / "pretrain_gpt.py"), run_name="__main__")
