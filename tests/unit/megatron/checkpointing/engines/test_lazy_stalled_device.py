"""Engine lazy where the device stops: a stand-in stream, and tensors on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fileio import device_copies
from megatron.fileio.device_waits import DeviceStalledError
from restart_trace.recorder import untraced_operation
from tests.unit.megatron.checkpointing.engines.lazy_helpers import check, engine, files, load
from tests.unit.megatron.checkpointing.engines.stand_in_stream import StandInStream

BLOCKS_BEFORE_IT_STOPS = 3


def test_a_device_that_stops_fails_the_save_and_keeps_its_buffers_from_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stream = StandInStream(stops_after=2 * BLOCKS_BEFORE_IT_STOPS)
    monkeypatch.setattr(device_copies, "side_stream", stream.on_a_device)
    saving, same = engine(io_threads=2, device_timeout_s=0.2, rank=5), files()
    (tmp_path / "first").mkdir()
    pending = saving.begin_save(files(), tmp_path / "first", untraced_operation())
    pending.release_state()  # returns, and leaves what went wrong to `wait`
    with pytest.raises(DeviceStalledError) as caught:
        pending.wait()
    assert str(caught.value).startswith("rank 5, phase device_to_host: the cop")
    held = saving._cache.allocated_bytes
    assert held <= BLOCKS_BEFORE_IT_STOPS * 64 * 1024, "a buffer that may still be written to is used again"
    reachable = stream.pins.pinned
    assert sum(reachable.values()) > held, "memory that the device may still write into was given back"

    stream.stops_after = None
    saving.options = replace(saving.options, device_timeout_s=300.0)  # of a machine, however busy
    (tmp_path / "second").mkdir()
    pending = saving.begin_save(files(), tmp_path / "second", untraced_operation())
    pending.release_state()
    check(load(tmp_path / "second", pending.wait()), same)
