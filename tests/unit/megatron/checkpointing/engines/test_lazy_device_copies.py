"""Engine lazy on a device, by a stand-in stream: what is pinned when, what is recorded of the copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.engines.base import MIB
from megatron.checkpointing.engines.lazy import host_cache
from megatron.config.errors import ConfigError
from megatron.fileio import device_copies
from restart_trace.process import RankIdentity, rank_fields
from restart_trace.reading import read_records
from restart_trace.recorder import Recorder, untraced_operation
from restart_trace.sink import JsonlSink
from tests.unit.megatron.checkpointing.engines.lazy_helpers import (
    BLOCK,
    check,
    engine,
    files,
    load,
    losing_its_processor,
)
from tests.unit.megatron.checkpointing.engines.stand_in_stream import DEVICE_NS, CountingPins, HeldPins, StandInStream

STATE = 3 * MIB


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> StandInStream:
    stream = StandInStream()
    monkeypatch.setattr(device_copies, "side_stream", stream.on_a_device)
    return stream


def traced_save(saving: Any, directory: Path) -> tuple[list[Any], list[dict[str, Any]]]:
    """A save whose state is released; the files, and the records."""
    path = directory / "rank_00000_cycle_000.jsonl"
    identity = RankIdentity(0, 1, 0, (0, 0, 0), (1, 1, 1))
    recorder = Recorder(JsonlSink(path), rank_fields(identity, {}, run_id="r", cycle=0))
    (directory / "saved").mkdir()
    with recorder.operation("save", tag="global_step1", step=1) as op:
        pending = saving.begin_save(files(STATE), directory / "saved", op)
        pending.release_state()
        saved = pending.wait()
    recorder.close()
    return saved, list(read_records(path))


def test_a_save_takes_nothing_but_what_was_pinned_at_the_start(stream: StandInStream, tmp_path: Path) -> None:
    saving = engine(io_threads=2)
    saving.prepare_memory(STATE + BLOCK, 64 << 30, stream, untraced_operation())  # pyright: ignore[reportArgumentType]
    saving.wait_for_memory()
    pinned = dict(stream.pins.pinned)
    assert len(pinned) == 2, "one piece for loads, one for saves"
    saved, _ = traced_save(saving, tmp_path)
    assert stream.pins.pinned == pinned
    check(load(tmp_path / "saved", saved), files(STATE))


def test_nothing_waits_for_pinning_but_a_save_that_needs_more_than_is_pinned(
    monkeypatch: pytest.MonkeyPatch, stream: StandInStream, tmp_path: Path
) -> None:
    """The wait is a span of the start-up, whose operation may have ended."""
    monkeypatch.setattr(host_cache, "PIECE", 4 * BLOCK)
    stream.pins = pins = HeldPins(at_once=3)  # one for loads, two for saves
    path = tmp_path / "rank_00000_cycle_001.jsonl"
    identity = RankIdentity(0, 1, 0, (0, 0, 0), (1, 1, 1))
    recorder = Recorder(JsonlSink(path), rank_fields(identity, {}, run_id="r", cycle=1))
    saving = engine(io_threads=2)
    with recorder.operation("startup") as op:
        saving.prepare_memory(STATE + BLOCK, 64 << 30, stream, op)  # pyright: ignore[reportArgumentType]
        assert not saving.memory_is_ready()
    (tmp_path / "saved").mkdir()
    pending = saving.begin_save(files(STATE), tmp_path / "saved", untraced_operation())
    pins.go_on.set()
    pending.release_state()
    check(load(tmp_path / "saved", pending.wait()), files(STATE))
    saving.wait_for_memory()
    assert saving.memory_is_ready()
    recorder.close()
    spans = [r for r in read_records(path) if r["type"] == "span" and not r["blocking"]]
    assert {s["detail"] for s in spans if s["thread"] == "host-memory"} == {"allocate", "pin"}
    assert {(s["phase"], s["detail"]) for s in spans if s["thread"] == "lazy-copy"} <= {("host_memory", "wait")}


def test_a_save_tells_that_its_buffers_could_not_be_pinned(
    monkeypatch: pytest.MonkeyPatch, stream: StandInStream, tmp_path: Path
) -> None:
    monkeypatch.setattr(host_cache, "PIECE", 4 * BLOCK)
    saving = engine(io_threads=2)
    saving.prepare_memory(0, 64 << 30, stream, untraced_operation())  # pyright: ignore[reportArgumentType]
    stream.pins.limit = 2 * sum(stream.pins.pinned.values()) + 8 * BLOCK  # for loads again, and eight blocks
    saving.prepare_memory(STATE, 64 << 30, stream, untraced_operation())  # pyright: ignore[reportArgumentType]
    pending = saving.begin_save(files(STATE), tmp_path, untraced_operation())
    pending.release_state()
    with pytest.raises(ConfigError, match=r"^--host-cache-size not given .*could not be pinned: CUDA_ERROR_OUT"):
        pending.wait()


def test_the_copies_are_recorded_as_the_device_measured_them(stream: StandInStream, tmp_path: Path) -> None:
    saved, records = traced_save(engine(), tmp_path)
    (end,) = [r["values"] for r in records if r["type"] == "probe" and r["at"] == "end"]
    (span,) = [r for r in records if r.get("phase") == "device_to_host" and not r["blocking"]]
    blocks = -(-end["device_to_host_bytes"] // BLOCK)
    assert span["bytes"] == end["device_to_host_bytes"] == pytest.approx(saved[0].num_bytes, rel=0.01)
    assert end["device_to_host_device_s"] == pytest.approx(blocks * DEVICE_NS / 1e9)
    assert span["duration_ns"] <= blocks * DEVICE_NS and end["device_to_host_queueing_s"] > 0
    assert 0 <= end["device_to_host_before_release_bytes"] <= end["device_to_host_bytes"]


def test_no_block_is_left_out_wherever_the_copying_thread_loses_its_processor(
    stream: StandInStream, tmp_path: Path
) -> None:
    with losing_its_processor("lazy-copy"):
        saved, _ = traced_save(engine(io_threads=2), tmp_path)
    check(load(tmp_path / "saved", saved), files(STATE))


def test_a_host_that_cannot_have_the_memory_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, stream: StandInStream
) -> None:
    monkeypatch.setattr(host_cache, "memory_limit", lambda: (64 << 30, "the limit of /sys/fs/cgroup/memory.max"))
    saving = engine(local_world_size=8, host_cache_bytes=16 << 30)
    saving.prepare_memory(STATE, 64 << 30, stream, untraced_operation())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError) as caught:
        saving.wait_for_memory()
    assert str(caught.value) == (
        "--host-cache-size 16 (GiB; the cache is 16.00): 8 ranks of this host would pin 128.0 GiB, and the limit of "
        "/sys/fs/cgroup/memory.max is 64.0 GiB; lower the flag, or run fewer ranks on a host"
    )


def test_pinning_that_fails_is_refused_with_the_flag(stream: StandInStream) -> None:
    stream.pins = CountingPins(limit=32 * MIB)  # enough for loads
    saving = engine(host_cache_bytes=MIB)
    saving.prepare_memory(STATE, 64 << 30, stream, untraced_operation())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"^--host-cache-size 0\.000976562 .*could not be pinned: CUDA_ERROR_OUT"):
        saving.wait_for_memory()
    stream.pins = CountingPins(limit=0)
    saving = engine()
    saving.prepare_memory(STATE, 64 << 30, stream, untraced_operation())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"^--checkpoint-engine lazy: .* could not be pinned: the buffers of loads"):
        saving.wait_for_memory()
