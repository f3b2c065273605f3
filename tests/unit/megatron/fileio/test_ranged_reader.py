"""Byte ranges of files that are read into tensors: what lies beside them stays as it is."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fileio.direct_files import ALIGNMENT
from megatron.fileio.extents import Extent, extents, file_plan
from megatron.fileio.host_buffers import STAGING_BUFFERS, new_buffer
from megatron.fileio.open_files import RangedFile
from megatron.fileio.ranged_reader import Label, Targets, open_all, read_ranges
from restart_trace.recorder import Operation, Recorder, untraced_operation
from restart_trace.sink import JsonlSink
from tests.unit.trace_helpers import PROCESS, read

LABEL = Label(("load", "deserialize"), "reader")


def aligned(num_bytes: int) -> torch.Tensor:
    """uint8 memory that begins at a multiple of ALIGNMENT."""
    memory = torch.full((num_bytes + ALIGNMENT,), 0xAA, dtype=torch.uint8)
    ahead = -memory.data_ptr() % ALIGNMENT
    return memory[ahead : ahead + num_bytes]


def read_into(
    target: torch.Tensor, path: Path, num_bytes: int, threads: int | None = None, op: Operation | None = None
) -> None:
    with ExitStack() as stack:
        files = open_all({path: path.stat().st_size}, "on", stack)
        plan = file_plan(path, [(0, 0, 0, num_bytes)])
        read_ranges(extents(plan), files, Targets([target], {}), threads, LABEL, op or untraced_operation())


def test_a_direct_read_of_the_end_of_a_file_spares_what_follows_in_memory(path_on_disk: Path) -> None:
    """The rest of the target is of another file, in a reshard."""
    size = 3 * ALIGNMENT + 100
    path = path_on_disk / "file"
    path.write_bytes(bytes(range(1, 101)) * (size // 100) + bytes([7]) * (size % 100))
    target = aligned(8 * ALIGNMENT)
    read_into(target, path, size)
    assert target[:size].numpy().tobytes() == path.read_bytes()
    assert bool((target[size:] == 0xAA).all())


def test_no_thread_is_left_when_one_cannot_be_started(path_on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read from files that are closed, or from others that have their numbers by then."""
    path = path_on_disk / "file"
    path.write_bytes(bytes(1 << 24))
    start, started = threading.Thread.start, []

    def start_three(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        run = thread.run

        def later() -> None:  # so that it is still at work when the next one cannot be started
            time.sleep(0.2)
            run()

        thread.run = later
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_three)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        read_into(aligned(1 << 24), path, 1 << 24, threads=8)
    assert len(started) == 3 and not any(thread.is_alive() for thread in started)


def test_nothing_lies_between_planning_and_reading(path_on_disk: Path, tmp_path: Path) -> None:
    """However long a busy machine takes until the threads are started."""
    path, trace = path_on_disk / "file", tmp_path / "trace.jsonl"
    path.write_bytes(bytes(1 << 20))
    with Recorder(JsonlSink(trace), PROCESS).operation("load") as op:
        with op.span("load", "read"):
            pass
        read_into(aligned(1 << 20), path, 1 << 20, threads=1, op=op)
    planned, *_, reading = [r for r in read(trace) if r["type"] == "span" and r["thread"] == "MainThread"]
    assert reading["start_ns"] == planned["end_ns"]


class OnADevice(Targets):
    """Targets that stand for tensors of a CUDA device; their memory is on the CPU."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors, {})
        self.device = torch.device("cuda", 0)

    def on_cpu(self, extent: Extent) -> bool:
        return False

    def direct(self, extent: Extent, start: int, stop: int, file: RangedFile) -> memoryview | None:
        return None


class StandInCuda:
    """What torch.cuda is asked for by a read; `order`: of which stream, in its order."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def stream_for_copies(self, device: torch.device) -> Any:
        return SimpleNamespace(wait_event=self.order.append, record_event=lambda event: event)

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(record_event=lambda: "what was queued before")

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        self.order.append("copies")
        return nullcontext()

    def event(self, **_: bool) -> Any:
        return SimpleNamespace(synchronize=lambda: None)


def test_the_host_waits_for_no_work_queued_before_a_load(monkeypatch: pytest.MonkeyPatch, path_on_disk: Path) -> None:
    """Copies follow it on the device: the host waiting for it would be time of the load, and reads nothing."""
    cuda = StandInCuda()
    for name, stand_in in (
        ("Stream", cuda.stream_for_copies), ("current_stream", cuda.current_stream), ("stream", cuda.stream),
        ("Event", cuda.event), ("synchronize", lambda *_: pytest.fail("the host waits for the device")),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(STAGING_BUFFERS, "take", lambda size, device: new_buffer(size, None))
    monkeypatch.setattr(STAGING_BUFFERS, "add", lambda buffers: None)
    path = path_on_disk / "file"
    path.write_bytes(bytes(range(256)) * (8 * ALIGNMENT // 256))
    target = aligned(8 * ALIGNMENT)
    with ExitStack() as stack:
        files = open_all({path: path.stat().st_size}, "on", stack)
        parts = extents(file_plan(path, [(0, 0, 0, len(target))]))
        read_ranges(parts, files, OnADevice([target]), 1, LABEL, untraced_operation())
    assert target.numpy().tobytes() == path.read_bytes()
    assert cuda.order[:2] == ["what was queued before", "copies"] and set(cuda.order[1:]) == {"copies"}
