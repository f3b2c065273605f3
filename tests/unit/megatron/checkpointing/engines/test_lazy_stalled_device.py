"""Engine lazy where the device stops: its streams and events are stand-ins, and its tensors are on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpointing.engines.lazy import host_cache, writer
from megatron.fileio.device_waits import DeviceStalledError
from megatron.fileio.host_buffers import Buffer
from restart_trace.recorder import untraced_operation
from tests.unit.megatron.checkpointing.engines.lazy_helpers import check, engine, files, load

BLOCKS_BEFORE_IT_STOPS = 3


class Device:
    """Counts the copies that were queued; when it stops, those that were queued later are never done."""

    def __init__(self) -> None:
        self.stops = True
        self.queued = 0

    def record_event(self) -> Any:
        self.queued += 1
        return Event(self, self.queued)


class Event:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def query(self) -> bool:
        return not self.device.stops or self.number <= BLOCKS_BEFORE_IT_STOPS


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    gather = host_cache.gather

    def queued(buffer: Buffer, sources: Any, copies: Any, stream: Device) -> Event:
        gather(buffer, sources, copies)
        return stream.record_event()

    monkeypatch.setattr(writer, "_side_stream", lambda tensors: device)
    monkeypatch.setattr(writer, "gather", queued)
    monkeypatch.setattr(host_cache, "Buffer", lambda size, pinned: Buffer(size, pinned=False))
    return device


def test_a_device_that_stops_fails_the_save_and_keeps_its_buffers_from_the_next(device: Device, tmp_path: Path) -> None:
    saving, same = engine(io_threads=2, device_timeout_s=0.2, rank=5), files()
    (tmp_path / "first").mkdir()
    pending = saving.begin_save(files(), tmp_path / "first", untraced_operation())
    pending.release_state()  # returns, and leaves what went wrong to `wait`
    with pytest.raises(DeviceStalledError) as caught:
        pending.wait()
    assert str(caught.value).startswith("rank 5, phase device_to_host: the cop")
    held = saving._cache.allocated_bytes
    assert held <= BLOCKS_BEFORE_IT_STOPS * 64 * 1024, "a buffer that may still be written to is used again"

    device.stops = False
    (tmp_path / "second").mkdir()
    pending = saving.begin_save(files(), tmp_path / "second", untraced_operation())
    pending.release_state()
    check(load(tmp_path / "second", pending.wait()), same)
