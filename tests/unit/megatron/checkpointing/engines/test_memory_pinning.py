"""Engine `memory` on a device: its slots are pinned, by a stand-in for the driver's library, beside training.

The tensors are on the CPU, with a stand-in for the stream; what is copied where is the engine's own.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState
from megatron.checkpointing.engines.errors import CheckpointSaveError
from megatron.checkpointing.engines.lazy import engine as lazy_engine
from megatron.checkpointing.engines.lazy import writer
from megatron.checkpointing.engines.lazy.format import capture, with_data_start
from megatron.checkpointing.engines.lazy.writer import cut_into_blocks
from megatron.checkpointing.engines.memory import engine as memory_engine
from megatron.checkpointing.engines.memory.engine import MemoryEngine
from megatron.checkpointing.engines.memory.slot_save import SlotMemory
from megatron.config import ConfigError
from megatron.fileio import device_copies
from megatron.fileio.host_buffers import Buffer
from megatron.fileio.pinned_memory import CudaPins
from restart_trace.process import RankIdentity, rank_fields
from restart_trace.reading import read_records
from restart_trace.recorder import Operation, Recorder, untraced_operation
from restart_trace.sink import JsonlSink
from tests.unit.megatron.checkpointing.engines.lazy_helpers import BLOCK
from tests.unit.megatron.checkpointing.engines.stand_in_stream import CountingPins, HeldPins, StandInStream
from tests.unit.megatron.fileio import stand_in_driver

NAME = "mp_rank_00_model_states.pt"
PIECE = 3 * BLOCK + 4096  # no block begins or ends with a piece
RESERVED = 1 << 20
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_in_driver.build(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(library: Path) -> ctypes.CDLL:
    return stand_in_driver.opened(library)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> StandInStream:
    monkeypatch.setattr(lazy_engine, "BLOCK", BLOCK)  # RLIMIT_MEMLOCK may be as low as 8 MiB
    monkeypatch.setattr(memory_engine, "SlotMemory", functools.partial(SlotMemory, piece_bytes=PIECE))
    stream = StandInStream()
    monkeypatch.setattr(device_copies, "side_stream", stream.on_a_device)
    return stream


def on_a_device(stream: StandInStream, op: Operation) -> MemoryEngine:
    """An engine as the trainer sets it up: memory for loads, then slots, which begin to be pinned."""
    engine = MemoryEngine(EngineOptions(io_block_bytes=BLOCK, io_threads=2, fsync=False))
    engine.prepare_memory(RESERVED, 64 << 30, stream, op)  # pyright: ignore[reportArgumentType]
    engine.reserve(RESERVED)
    return engine


def state(elements: int, value: float) -> list[FileState]:
    return [FileState(NAME, {"weights": torch.full((elements,), value), "more": torch.arange(elements) + value})]


def save(engine: MemoryEngine, files: list[FileState]) -> None:
    pending = engine.begin_memory_save(files, {"save": "s"}, None, untraced_operation())
    pending.release_state()
    assert pending.wait() == []
    engine.settle()


def check_kept(engine: MemoryEngine, files: list[FileState]) -> None:
    kept = [it for it in engine.memory_saves() if it.record["save"] == "s"]
    loaded = [engine.load([NAME], it.checkpoint, untraced_operation())[NAME] for it in kept]
    wanted = files[0].state
    assert any(all(torch.equal(found[key], wanted[key]) for key in wanted) for found in loaded)


def test_every_copy_goes_to_one_pinned_piece_whatever_the_size_of_a_save(
    monkeypatch: pytest.MonkeyPatch, stream: StandInStream, library: Path, driver: ctypes.CDLL
) -> None:
    """Saves that shrink and grow get other pages from the kernel, which are pinned again."""
    monkeypatch.setattr(stream, "pins", CudaPins(DEVICE, str(library)))
    copies = 0

    def checked(buffer: Buffer, sources: Any, pieces: Any, to: Any) -> Any:
        nonlocal copies
        for piece in pieces:
            copies += 1
            at, num_bytes = buffer.array.ctypes.data + piece.offset, piece.stop - piece.start
            assert driver.is_one_piece(at, num_bytes), f"{num_bytes} bytes that are not pinned, or in two pieces"
        return gather(buffer, sources, pieces, to)

    gather = writer.gather
    monkeypatch.setattr(writer, "gather", checked)
    before = driver.locked_bytes()
    engine = on_a_device(stream, untraced_operation())
    engine.wait_for_memory()
    loads = driver.locked_bytes() - before - 2 * RESERVED
    assert loads > 0 and engine.memory_is_ready()
    for number, elements in enumerate((50_000, 50_000, 20_000, 60_000, 60_000, 200_000, 30_000)):
        files = state(elements, float(number))
        save(engine, files)
        check_kept(engine, files)
    assert copies > 50
    engine.close()
    assert driver.locked_bytes() == before + loads, "slots stay pinned after the engine has let go of them"


def test_training_waits_for_no_slot_and_the_first_save_for_its_own(stream: StandInStream, tmp_path: Path) -> None:
    """`reserve` returns while the driver still pins; a save then waits for the slot that it needs."""

    stream.pins = pins = HeldPins(at_once=1)  # that of loads
    path = tmp_path / "rank_00000_cycle_000.jsonl"
    identity = RankIdentity(0, 1, 0, (0, 0, 0), (1, 1, 1))
    recorder = Recorder(JsonlSink(path), rank_fields(identity, {}, run_id="r", cycle=0))
    with recorder.operation("startup") as op:
        engine = MemoryEngine(EngineOptions(io_block_bytes=BLOCK, io_threads=2, fsync=False))
        engine.prepare_memory(RESERVED, 64 << 30, stream, op)  # pyright: ignore[reportArgumentType]
        engine.reserve(RESERVED)
        assert not engine.memory_is_ready()
    files = state(50_000, 1.0)
    pending = engine.begin_memory_save(files, {"save": "s"}, None, untraced_operation())
    pins.go_on.set()
    pending.release_state()
    assert pending.wait() == []
    engine.wait_for_memory()
    assert engine.memory_is_ready()
    check_kept(engine, files)
    recorder.close()
    spans = [r for r in read_records(path) if r["type"] == "span" and r["phase"] == "host_memory" and not r["blocking"]]
    pinned = [s for s in spans if (s["thread"], s["detail"]) == ("host-memory", "pin")]
    assert 0 < sum(s["bytes"] for s in pinned) <= 2 * RESERVED
    waits = [s for s in spans if s not in pinned]  # none if the thread was in the other slot
    assert {(s["thread"], s["detail"]) for s in waits} <= {("lazy-save", "wait")}
    engine.close()


@pytest.mark.parametrize("limit", [RESERVED, 0])
def test_slots_that_cannot_be_pinned_are_told_before_they_are_needed(stream: StandInStream, limit: int) -> None:
    stream.pins = CountingPins()
    engine = MemoryEngine(EngineOptions(io_block_bytes=BLOCK, io_threads=2, fsync=False))
    engine.prepare_memory(RESERVED, 64 << 30, stream, untraced_operation())  # pyright: ignore[reportArgumentType]
    stream.pins.limit = sum(stream.pins.pinned.values()) + limit
    engine.reserve(RESERVED)
    with pytest.raises(ConfigError, match=r"^--checkpoint-engine memory: .*slots.*CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        engine.wait_for_memory()
    stream.pins.limit = 0
    if limit == 0:
        pending = engine.begin_memory_save(state(50_000, 1.0), {"save": "s"}, None, untraced_operation())
        pending.release_state()
        with pytest.raises(CheckpointSaveError, match="could not be pinned: CUDA_ERROR_OUT_OF_MEMORY"):
            pending.wait()
    engine.close()


def test_on_the_cpu_nothing_is_pinned_and_the_bytes_are_the_same(
    monkeypatch: pytest.MonkeyPatch, stream: StandInStream
) -> None:
    """A slot holds the same bytes, however its blocks were cut and copied."""

    def bytes_of_a_save(engine: MemoryEngine) -> bytes:
        save(engine, state(50_000, 2.0))
        (kept,) = engine.memory_saves()
        content = kept.checkpoint.path(NAME).read_bytes()
        engine.close()
        return content

    pinned = bytes_of_a_save(on_a_device(stream, untraced_operation()))
    monkeypatch.setattr(device_copies, "side_stream", lambda _: None)
    engine = MemoryEngine(EngineOptions(io_block_bytes=BLOCK, io_threads=2, fsync=False))
    engine.reserve(RESERVED)
    assert engine.memory_is_ready() and bytes_of_a_save(engine) == pinned


def test_no_piece_of_a_block_crosses_a_boundary() -> None:
    contents = with_data_start(capture(state(50_000, 0.0), True).contents)
    blocks = cut_into_blocks(contents, BLOCK, PIECE)
    ends = [(b.position + p.offset, b.position + p.offset + p.stop - p.start) for b in blocks for p in b.pieces]
    assert all(start // PIECE == (stop - 1) // PIECE for start, stop in ends)
    assert sum(stop - start for start, stop in ends) == contents.data_bytes
    assert len(ends) > sum(len(block.pieces) for block in cut_into_blocks(contents, BLOCK))
