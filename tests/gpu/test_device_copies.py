"""Pinned memory and the copies of engine lazy, with the driver itself.

Bandwidths are recorded as properties of the test, which the page of the tier shows; what must be so on any device is
asserted.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState, SavedCheckpoint
from megatron.checkpointing.engines.lazy.engine import LazyEngine
from megatron.checkpointing.engines.memory.engine import MemoryEngine
from megatron.fileio.device_copies import CopyStream
from megatron.fileio.host_memory import available_memory
from megatron.fileio.pinned_memory import CudaPins, PinnedAhead, PinningError, pinned_memory
from restart_trace.clock import now_ns
from restart_trace.process import RankIdentity, rank_fields
from restart_trace.reading import read_records
from restart_trace.recorder import Recorder, untraced_operation
from restart_trace.sink import JsonlSink

GIB = 1 << 30
CUDA = "cuda:0"
Property = Callable[[str, object], None]


def recorder_in(directory: Path) -> tuple[Recorder, Path]:
    """A recorder, and the file that it writes to."""
    path = directory / "rank_00000_cycle_000.jsonl"
    identity = RankIdentity(0, 1, 0, (0, 0, 0), (1, 1, 1))
    return Recorder(JsonlSink(path), rank_fields(identity, {}, run_id="r", cycle=0)), path


def test_memory_is_pinned_until_its_last_view_is_gone() -> None:
    device = torch.device(CUDA)
    torch.empty(1, device=device)
    memory = pinned_memory(64 << 20, CudaPins(device))
    address = memory.ctypes.data
    assert torch.from_numpy(memory).is_pinned()
    view = torch.from_numpy(memory[4096:8192])
    del memory
    gc.collect()
    assert view.is_pinned()
    del view
    gc.collect()
    with pytest.raises(PinningError, match="CUDA_ERROR"):
        CudaPins(device).unpin(address)  # it is not registered any more


def test_a_gibibyte_is_pinned_in_the_background(tmp_path: Path, record_property: Property) -> None:
    device = torch.device(CUDA)
    torch.empty(1, device=device)
    recorder, path = recorder_in(tmp_path)
    pieces = []
    with recorder.operation("startup") as op:
        PinnedAhead(2 * GIB, CudaPins(device), pieces.append, op).wait()
    recorder.close()
    assert all(torch.from_numpy(piece).is_pinned() for piece in pieces) and len(pieces) == 2
    for span in read_records(path):
        if span["type"] == "span" and span["detail"] in ("allocate", "pin"):
            record_property(f"{span['detail']}_GBps", span["bytes"] / span["duration_ns"])


def test_a_save_is_measured_by_the_device(tmp_path: Path, record_property: Property) -> None:
    device = torch.device(CUDA)
    weights = torch.randn(GIB // 2, device=device)  # 2 GiB
    state = [FileState("mp_rank_00_model_states.pt", {"weights": weights})]
    engine = LazyEngine(EngineOptions())
    recorder, path = recorder_in(tmp_path)
    with recorder.operation("startup") as op:
        engine.prepare_memory(2 * GIB, available_memory(), CopyStream(device), op)
        engine.wait_for_memory()
    with recorder.operation("save", tag="global_step1", step=1) as op:
        pending = engine.begin_save(state, tmp_path, op)
        pending.release_state()
        saved = pending.wait()
    recorder.close()
    start, save = (r["values"] for r in read_records(path) if r["type"] == "probe" and r["at"] == "end")
    speed = save["device_to_host_bytes"] / save["device_to_host_device_s"]
    record_property("device_to_host_GBps", speed / 1e9)
    record_property("bus_to_host_GBps", start["bus_to_host_bytes_per_s"] / 1e9)
    record_property("bus_to_device_GBps", start["bus_to_device_bytes_per_s"] / 1e9)
    record_property("share_of_bus", speed / start["bus_to_host_bytes_per_s"])
    assert save["device_to_host_bytes"] >= weights.numel() * 4
    loaded = engine.load([state[0].name], SavedCheckpoint(tmp_path, {f.name: f for f in saved}), untraced_operation())
    assert torch.equal(loaded[state[0].name]["weights"], weights.cpu())
    engine.close()


def test_pageable_memory_is_slower(record_property: Property) -> None:
    """For comparison with pinned memory: what a copy costs without."""
    source = torch.ones(GIB, dtype=torch.uint8, device=CUDA)
    target = torch.zeros(GIB, dtype=torch.uint8)  # its pages are there
    torch.cuda.synchronize()
    began = now_ns()
    target.copy_(source)
    record_property("pageable_GBps", GIB / (now_ns() - began))
    assert torch.equal(target, source.cpu())


def test_copies_beside_computing(tmp_path: Path, record_property: Property) -> None:
    """A save of engine lazy while matrices are multiplied: what each costs the other."""
    device = torch.device(CUDA)
    weights = torch.randn(GIB, device=device)  # 4 GiB: 80 ms and more of copies
    factor = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    engine = LazyEngine(EngineOptions())
    engine.prepare_memory(5 * GIB, available_memory(), CopyStream(device), untraced_operation())
    engine.wait_for_memory()

    def computing_s() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(50):  # 1.4 ms each at 800 TFLOP/s
            torch.mm(factor, factor)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    computing_s()
    alone_s = computing_s()
    recorder, path = recorder_in(tmp_path)
    with recorder.operation("save", tag="global_step1", step=1) as op:
        pending = engine.begin_save([FileState("mp_rank_00_model_states.pt", {"weights": weights})], tmp_path, op)
        beside_s = computing_s()
        pending.release_state()
        pending.wait()
    recorder.close()
    (save,) = (r["values"] for r in read_records(path) if r["type"] == "probe" and r["at"] == "end")
    assert save["device_to_host_bytes"] >= weights.nbytes
    record_property("beside_computing_GBps", save["device_to_host_bytes"] / save["device_to_host_device_s"] / 1e9)
    record_property("computing_beside_copies", beside_s / alone_s)
    engine.close()


def test_engine_memory_copies_to_its_slot_and_back(device: torch.device, record_property: Property) -> None:
    """On a device the slot is pinned first, as in training."""
    weights = torch.randn((GIB if device.type == "cuda" else 16 << 20) // 4, device=device)
    name = "mp_rank_00_model_states.pt"
    engine = MemoryEngine(EngineOptions())
    if device.type == "cuda":
        engine.prepare_memory(weights.nbytes, available_memory(), CopyStream(device), untraced_operation())
    engine.reserve(weights.nbytes + (1 << 20))
    engine.wait_for_memory()
    began = now_ns()
    pending = engine.begin_memory_save(
        [FileState(name, {"weights": weights})], {"save": "1"}, None, untraced_operation()
    )
    pending.release_state()
    assert pending.wait() == []  # nothing goes to storage
    record_property("to_slot_GBps", weights.nbytes / (now_ns() - began))
    engine.settle()
    (kept,) = engine.memory_saves()
    live = torch.zeros_like(weights)
    began = now_ns()
    loaded = engine.load_into([FileState(name, {"weights": live})], kept.checkpoint, untraced_operation())
    record_property("from_slot_GBps", weights.nbytes / (now_ns() - began))
    assert torch.equal(loaded[name]["weights"].to(device), weights)
    engine.close()
