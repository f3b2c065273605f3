"""A save and a load of several small files by an engine, with their spans: what lies between these is in no phase."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing.engines.base import CheckpointEngine, FileState, SavedCheckpoint
from restart_trace.recorder import Recorder
from restart_trace.sink import JsonlSink
from tests.unit.trace_helpers import PROCESS, read

NAMES = [f"{i}.pt" for i in range(4)]


@dataclass(frozen=True)
class Recorded:
    """One operation: when it began, ns, and its spans."""

    start_ns: int
    spans: list[dict[str, Any]]


def recorded_save_and_load(engine: CheckpointEngine, directory: Path) -> tuple[Recorded, Recorded]:
    """A save of NAMES into `directory`, and a load of them."""
    trace = directory / "trace.jsonl"
    recorder = Recorder(JsonlSink(trace), PROCESS)
    with recorder.operation("save", tag="t", step=1) as op:
        saved = engine.save([FileState(name, {"t": torch.ones(8)}) for name in NAMES], directory, op)
    with recorder.operation("load", tag="t", step=1) as op:
        engine.load(NAMES, SavedCheckpoint(directory, {file.name: file for file in saved}), op)
    recorder.close()
    records = read(trace)
    spans = [record for record in records if record["type"] == "span"]
    starts = [record["start_ns"] for record in records if record["type"] == "operation_begin"]
    first, second = (Recorded(start, [s for s in spans if s["op"] == op]) for op, start in enumerate(starts))
    return first, second


def time_in_no_window(spans: Sequence[dict[str, Any]], start_ns: int) -> int:
    """Of the time from `start_ns` to the end of the last of `spans`, ns that are in none of their windows."""
    reached, missing = start_ns, 0
    for span in sorted(spans, key=lambda span: span["start_ns"]):
        missing += max(span["start_ns"] - reached, 0)
        reached = max(reached, span["end_ns"])
    return missing
