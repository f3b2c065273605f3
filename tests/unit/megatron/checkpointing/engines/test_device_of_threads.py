"""The device of the threads that save and load, by a stand-in for torch's accelerator that notes what each selects."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.checkpointing.engines.base import CheckpointEngine, EngineOptions, SavedCheckpoint
from megatron.checkpointing.engines.registry import create_engine
from megatron.checkpointing.save.background import THREAD_NAME, BackgroundSave
from megatron.fileio import device_copies
from restart_trace.recorder import untraced_operation
from tests.unit.megatron.checkpointing.engines.lazy_helpers import BLOCK, check, files
from tests.unit.megatron.checkpointing.engines.stand_in_stream import StandInStream
from tests.unit.restart_trace.stand_in_devices import StandInDevices

MINE = 3  # device of this rank


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> StandInDevices:
    found = StandInDevices(kind="xpu")  # for which no driver pins memory
    found.install(monkeypatch, torch)
    found.set_device_index(MINE)
    return found


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of all threads that are started."""
    names: list[str] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        names.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    yield names


def saved_and_loaded(engine: CheckpointEngine, directory: Path) -> None:
    """A save whose commit runs on its own thread, as in training, and a load of it."""
    op = untraced_operation()
    pending = engine.begin_save(files(), directory, op)
    saved = []
    save = BackgroundSave(1, op, pending, lambda: saved.extend(pending.wait()), 0)
    save.start()
    save.release_state()
    save.join()
    assert save.error is None
    checkpoint = SavedCheckpoint(directory, {file.name: file for file in saved})
    check(engine.load([file.name for file in files()], checkpoint, op), files())
    engine.close()


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_engine_lazy_on_a_device(
    monkeypatch: pytest.MonkeyPatch, devices: StandInDevices, started: list[str], tmp_path: Path, direct_io: str
) -> None:
    stream = StandInStream()
    monkeypatch.setattr(device_copies, "side_stream", stream.on_a_device)
    options = EngineOptions(io_block_bytes=BLOCK, io_threads=2, fsync=False, direct_io=direct_io)
    saved_and_loaded(create_engine("lazy", options), tmp_path)
    of_a_save = ["lazy-save", "lazy-copy", "copies-done", THREAD_NAME]
    io = ["lazy-io-0", "lazy-io-1"]  # of the save and of the load
    assert sorted(started) == sorted(of_a_save + io + io)
    assert {name: devices.selected.get(name) for name in of_a_save} == {name: [MINE] for name in of_a_save}
    assert {name: devices.selected.get(name) for name in io} == {name: [MINE, MINE] for name in io}


@pytest.mark.parametrize("name", ["dcp-async", "torchsnapshot"])
def test_engines_of_libraries(devices: StandInDevices, started: list[str], tmp_path: Path, name: str) -> None:
    """The threads that are ours, and the library's in which our code runs."""
    saved_and_loaded(create_engine(name, EngineOptions(io_threads=1, fsync=False)), tmp_path)
    ours = [it for it in started if it.startswith(("torchsnapshot-", THREAD_NAME))]
    writing = [it for it in devices.selected if it not in (*ours, threading.current_thread().name)]
    assert ours and all(set(devices.selected.get(it, [])) == {MINE} for it in ours)
    if name == "dcp-async":
        assert writing, "the library's thread that writes"
    assert all(set(devices.selected[it]) == {MINE} for it in writing)
