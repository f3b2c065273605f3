"""A span of the trace around work on the device, against CUDA's events and torch's profiler of the same work.

What they say is recorded as properties of the test, which the page of the tier shows; only what cannot be otherwise is
asserted: both lie within the span.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from restart_trace.process import RankIdentity, rank_fields
from restart_trace.reading import read_records
from restart_trace.recorder import Recorder
from restart_trace.sink import JsonlSink

SIZE = {"cuda": 1 << 30, "cpu": 1 << 24}  # bytes
RESOLUTION_S = 1e-5  # of events, and of the profiler's sums
Property = Callable[[str, object], None]


def span_around(work: Callable[[], None], path: Path) -> float:
    """Seconds of the span `device_to_host` that is recorded around `work`."""
    recorder = Recorder(
        JsonlSink(path), rank_fields(RankIdentity(0, 1, 0, (0, 0, 0), (1, 1, 1)), {}, run_id="r", cycle=0)
    )
    with recorder.operation("save", tag="global_step1", step=1, engine="E") as op, op.span("device_to_host"):
        work()
    recorder.close()
    (span,) = [record for record in read_records(path) if record["type"] == "span"]
    return span["duration_ns"] / 1e9


def source_and_target(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor on the device and one of its size on the host, pinned if that makes a difference."""
    source = torch.ones(SIZE[device.type], dtype=torch.uint8, device=device)
    return source, torch.empty(source.shape, dtype=source.dtype, pin_memory=device.type == "cuda")


def test_events_lie_within_the_span(tmp_path: Path, record_property: Property) -> None:
    source, target = source_and_target(torch.device("cuda"))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def work() -> None:
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()

    work()  # the first one makes streams and maps pages
    span_s = span_around(work, tmp_path / "rank_00000_cycle_000.jsonl")
    events_s = begin.elapsed_time(end) / 1e3
    record_property("span_s", span_s)
    record_property("events_s", events_s)
    record_property("GBps_by_events", target.numel() / events_s / 1e9)
    assert torch.equal(target, source.cpu())
    assert 0 < events_s <= span_s + RESOLUTION_S


def test_the_profiler_sees_the_copy_within_the_span(
    device: torch.device, tmp_path: Path, record_property: Property
) -> None:
    source, target = source_and_target(device)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")

    def work() -> None:
        target.copy_(source, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    work()
    with profile(activities=activities) as profiler:
        span_s = span_around(work, tmp_path / "rank_00000_cycle_000.jsonl")
    total = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    copies = [event for event in profiler.key_averages() if "copy" in event.key.lower()]
    profiled_s = sum(getattr(event, total) for event in copies) / 1e6
    record_property("span_s", span_s)
    record_property("profiler_s", profiled_s)
    assert 0 < profiled_s <= span_s + RESOLUTION_S
