"""Memory that is pinned ahead: by a stand-in of the driver's library, compiled here, that locks pages for real."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.fileio.pinned_memory import (
    CudaPins,
    PinnedAhead,
    PinnedMapping,
    PinningError,
    pinned_memory,
    why_pinning_failed,
)
from restart_trace.process import RankIdentity, rank_fields
from restart_trace.reading import read_records
from restart_trace.recorder import Recorder, untraced_operation
from restart_trace.sink import JsonlSink
from tests.unit.megatron.fileio import stand_in_driver

pytestmark = pytest.mark.slow  # most tests start a process

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in_driver.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def limited(library: Path) -> Iterator[ctypes.CDLL]:
    """The library, with no more than 4 MiB to be locked, of which none is."""
    gc.collect()  # errors of tests before keep what they had pinned
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 * MIB, before[1]))
    yield stand_in_driver.opened(library)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_memory_is_pinned_until_its_last_view_is_gone(library: Path, limited: ctypes.CDLL) -> None:
    memory = pinned_memory(2 * MIB, CudaPins(DEVICE, str(library)))
    assert limited.locked_bytes() == len(memory) == 2 * MIB and memory.ctypes.data % 4096 == 0
    view = memory[MIB : MIB + 10]
    del memory
    gc.collect()
    assert limited.locked_bytes() == 2 * MIB
    del view
    gc.collect()
    assert limited.locked_bytes() == 0


def test_a_thread_without_a_context_pins_and_unpins(library: Path, limited: ctypes.CDLL) -> None:
    """As the threads that pin, read and write have none; nor has one in which the last view happens to go."""
    pins = CudaPins(DEVICE, str(library))
    with ThreadPoolExecutor(1) as other:
        memory = other.submit(pinned_memory, MIB, pins).result()
    assert limited.locked_bytes() == MIB
    held = [memory]
    del memory
    with ThreadPoolExecutor(1) as other:
        other.submit(held.clear).result()
    assert limited.locked_bytes() == 0


def test_a_device_that_is_not_there(library: Path) -> None:
    with pytest.raises(PinningError, match=r"^CUDA_ERROR_INVALID_DEVICE \(101\)$"):
        CudaPins(torch.device("cuda", 1), str(library))


def test_pieces_are_pinned_in_the_background_and_recorded(library: Path, limited: ctypes.CDLL, tmp_path: Path) -> None:
    path = tmp_path / "rank_00000_cycle_000.jsonl"
    identity = RankIdentity(0, 1, 0, (0, 0, 0), (1, 1, 1))
    recorder = Recorder(JsonlSink(path), rank_fields(identity, {}, run_id="r", cycle=0))
    pieces: list[np.ndarray[Any, Any]] = []
    with recorder.operation("startup") as op:
        ahead = PinnedAhead(3 * MIB, CudaPins(DEVICE, str(library)), pieces.append, op, piece_bytes=2 * MIB)
        ahead.wait()
    recorder.close()
    assert [len(piece) for piece in pieces] == [2 * MIB, MIB] and limited.locked_bytes() == 3 * MIB
    spans = [r for r in read_records(path) if r["type"] == "span" and not r["blocking"]]
    assert [(s["detail"], s["bytes"]) for s in spans] == [
        ("allocate", 2 * MIB), ("pin", 2 * MIB), ("allocate", MIB), ("pin", MIB),
    ]  # fmt: skip
    assert {(s["phase"], s["thread"]) for s in spans} == {("host_memory", "host-memory")}


def test_a_limit_on_locked_memory_is_told_with_what_to_do(library: Path, limited: ctypes.CDLL) -> None:
    pieces: list[np.ndarray[Any, Any]] = []
    pins = CudaPins(DEVICE, str(library))
    ahead = PinnedAhead(6 * MIB, pins, pieces.append, untraced_operation(), piece_bytes=2 * MIB)
    with pytest.raises(PinningError) as caught:
        ahead.wait()
    assert ahead.pinned_bytes == 4 * MIB
    assert why_pinning_failed(caught.value, 4 << 30, 6 << 30) == (
        "CUDA_ERROR_OUT_OF_MEMORY (2), after 4.00 of 6.00 GiB; RLIMIT_MEMLOCK is 4 MiB (raise it: ulimit -l unlimited, "
        "docker run --ulimit memlock=-1, LimitMEMLOCK=infinity for slurmd)"
    )


def test_memory_that_is_not_free_is_not_taken(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    from megatron.fileio import pinned_memory as module

    monkeypatch.setattr(module, "available_memory", lambda: MIB)
    ahead = PinnedAhead(2 * MIB, CudaPins(DEVICE, str(library)), lambda _: None, untraced_operation())
    with pytest.raises(PinningError, match=r"^0\.00 GiB of host memory are free, and 0\.00 GiB more are needed$"):
        ahead.wait()


class NotedPins:
    """Notes what was asked of it, and pins nothing: (offset from `start`, bytes), 0 bytes to unpin."""

    def __init__(self, start: int) -> None:
        self._start = start
        self.asked: list[tuple[int, int]] = []

    def pin(self, address: int, num_bytes: int) -> None:
        self.asked.append((address - self._start, num_bytes))

    def unpin(self, address: int) -> None:
        self.asked.append((address - self._start, 0))


def test_pins_of_pages_that_are_no_longer_the_files_are_renewed() -> None:
    """The device would go on writing into the pages that were cut off."""
    memory = np.zeros(10 * 4096, dtype=np.uint8)
    pins = NotedPins(memory.ctypes.data)
    mapping = PinnedMapping(memory, pins, 4 * 4096)

    def asked_for(num_pages: int) -> list[tuple[int, int]]:
        pins.asked.clear()
        pinned = sum(mapping.pin(num_pages * 4096))
        assert pinned == sum(num_bytes for _, num_bytes in pins.asked)
        return [(start // 4096, num_bytes // 4096) for start, num_bytes in pins.asked]

    assert asked_for(10) == [(0, 4), (4, 4), (8, 2)]
    assert asked_for(6) == asked_for(10) == [], "what is pinned stays so"
    mapping.cut_off(6 * 4096)
    assert asked_for(6) == []
    assert asked_for(7) == [(4, 0), (4, 3)]
    assert asked_for(10) == [(4, 0), (4, 4), (8, 0), (8, 2)]


def test_the_pins_of_a_mapping_end_with_its_last_view(library: Path, limited: ctypes.CDLL) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 2 * MIB), dtype=np.uint8)
    mapping = PinnedMapping(memory, CudaPins(DEVICE, str(library)), MIB)
    assert list(mapping.pin(2 * MIB)) == [MIB, MIB] and limited.locked_bytes() == 2 * MIB
    address = memory.ctypes.data
    assert limited.is_one_piece(address, MIB) and not limited.is_one_piece(address + 10, MIB)
    view = memory[10:20]
    del memory
    assert limited.locked_bytes() == 2 * MIB
    del view
    assert limited.locked_bytes() == 0


def test_a_forked_process_does_not_have_pinned_memory(library: Path, limited: ctypes.CDLL) -> None:
    """As a data worker: pages that are shared with it may be copied at the next write, away from the device."""
    memory = pinned_memory(MIB, CudaPins(DEVICE, str(library)))
    address = memory.ctypes.data
    flags, within = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(found[1], 16) <= address < int(found[2], 16)
        elif line.startswith("VmFlags:") and within:
            flags = line.split()[1:]
    assert "dc" in flags, "of proc(5): do not copy on fork"
