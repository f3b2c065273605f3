"""Engine `memory`: two slots in turn, SIGKILL at any instant, damage that is named, and what is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.engines.base import EngineOptions, FileState, MemorySave, SavedCheckpoint
from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointSaveError, EngineUnavailableError
from megatron.checkpointing.engines.memory.engine import MemoryEngine, SlotCheckpoint, why_training_waited
from megatron.fileio import direct_files
from megatron.peers.client import Peer, Sent
from megatron.peers.memory_slots import VARIABLE, hold_slots, let_go_of_slots
from restart_trace.recorder import untraced_operation
from tests.unit.megatron.checkpointing.engines.lazy_helpers import BLOCK
from tests.unit.trace_helpers import ROOT

NAME, OTHER = "layer_01-model_00-model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process holds the slots of two ranks, as a launcher does."""
    monkeypatch.delenv(VARIABLE, raising=False)
    hold_slots(2)
    yield
    let_go_of_slots()


def engine(local_rank: int = 0) -> MemoryEngine:
    options = EngineOptions(io_block_bytes=BLOCK, io_threads=2, fsync=False, rank=local_rank, local_rank=local_rank)
    return MemoryEngine(options)


def states(step: int) -> list[FileState]:
    weights = torch.full((100_003,), float(step), dtype=torch.bfloat16)
    return [
        FileState(NAME, {"weights": weights, "step": step}, on_storage=False),
        FileState(OTHER, {"master": torch.arange(50_001.0) + step, "ids": torch.tensor([step])}),
    ]


def save(mine: MemoryEngine, step: int, directory: Path | None = None) -> list[str]:
    pending = mine.begin_memory_save(states(step), {"save": f"s{step}", "step": step}, directory, untraced_operation())
    pending.release_state()
    return [file.name for file in pending.wait()]


def steps(mine: MemoryEngine) -> list[int]:
    return sorted(kept.record["step"] for kept in mine.memory_saves())


def kept(mine: MemoryEngine, step: int) -> MemorySave:
    (found,) = [kept for kept in mine.memory_saves() if kept.record["step"] == step]
    return found


def load(mine: MemoryEngine, checkpoint: SavedCheckpoint, names: tuple[str, ...] = (NAME, OTHER)) -> None:
    """Load and compare with what `states` has of the step that is found."""
    found = mine.load(names, checkpoint, untraced_operation())
    step = int(found[OTHER]["ids"])
    expected = {file.name: file.state for file in states(step)}
    for name in names:
        for key, value in expected[name].items():
            same = (
                torch.equal(found[name][key], value) if isinstance(value, torch.Tensor) else found[name][key] == value
            )
            assert same, f"{name}: {key}"


def test_two_saves_are_kept_and_the_agreed_one_is_not_written_over(launcher: None) -> None:
    mine = engine()
    for step in (1, 2, 3):
        save(mine, step)
        mine.settle()
        assert steps(mine) == [n for n in (step - 1, step) if n]
        load(mine, kept(mine, step).checkpoint)
    save(mine, 4)  # the ranks do not agree: the next save must leave step 3 alone
    save(mine, 5)
    assert steps(mine) == [3, 5]
    again = engine()
    again.keep("s3")
    save(again, 6)
    assert steps(again) == [3, 6]
    again.discard_memory_saves("s6")
    assert steps(again) == [3]
    again.discard_memory_saves(None)
    assert steps(again) == []


def test_what_another_replica_stores_is_kept_and_not_stored_again(launcher: None, tmp_path: Path) -> None:
    mine = engine(local_rank=1)
    pending = mine.begin_memory_save(states(7), {"save": "s7", "step": 7}, tmp_path, untraced_operation())
    pending.release_state()
    (file,) = pending.wait()
    mine.settle()
    assert file.states == (OTHER,) and file.num_bytes == (tmp_path / file.name).stat().st_size
    load(mine, SavedCheckpoint(tmp_path, {file.name: file}), (OTHER,))
    load(engine(local_rank=0), kept(mine, 7).checkpoint)  # a rank finds what others of its host have kept


def test_a_failed_write_to_storage_leaves_what_is_in_memory(launcher: None, tmp_path: Path) -> None:
    mine = engine()
    with pytest.raises(OSError):
        save(mine, 1, tmp_path / "not_there")
    assert steps(mine) == [1]
    load(mine, kept(mine, 1).checkpoint)


def test_a_save_that_is_given_up_is_sealed_but_neither_copied_nor_stored(launcher: None, tmp_path: Path) -> None:
    """The peer is not looked for: that would raise another error."""
    mine, why = engine(), "another rank has failed"
    mine.share_with([Peer("nobody", "", 1)])
    for step, directory in ((1, tmp_path), (2, None)):
        record = {"save": f"s{step}", "step": step}
        pending = mine.begin_memory_save(states(step), record, directory, untraced_operation())
        pending.give_up(why)
        pending.release_state()
        with pytest.raises(CheckpointSaveError, match=f"^{why}$"):
            pending.wait()
        load(mine, kept(mine, step).checkpoint)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_given_up_ends_while_it_is_written_to_storage(
    launcher: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is just being opened."""
    opened, given_up, open_direct = threading.Event(), threading.Event(), direct_files.open_direct

    def held(*arguments: Any) -> tuple[int, bool]:
        opened.set()
        assert given_up.wait(300)
        return open_direct(*arguments)

    monkeypatch.setattr(direct_files, "open_direct", held)
    mine, why = engine(), "another rank has failed"
    pending = mine.begin_memory_save(states(1), {"save": "s1", "step": 1}, tmp_path, untraced_operation())
    pending.release_state()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(pending.wait)
        assert opened.wait(300)
        pending.give_up(why)
        given_up.set()
        with pytest.raises(CheckpointSaveError, match=f"^{why}$"):
            waits.result()
    load(mine, kept(mine, 1).checkpoint)


def test_loaded_tensors_do_not_change_with_the_slot(launcher: None) -> None:
    mine = engine()
    save(mine, 1)
    found = mine.load([NAME, OTHER], kept(mine, 1).checkpoint, untraced_operation())
    for step in (2, 3, 4, 5):
        save(mine, step)
        mine.settle()
    assert torch.equal(found[OTHER]["master"], torch.arange(50_001.0) + 1) and int(found[OTHER]["ids"]) == 1
    assert torch.equal(found[NAME]["weights"], torch.full((100_003,), 1.0, dtype=torch.bfloat16))


def test_a_flipped_bit_anywhere_in_a_slot_is_found_and_the_slot_named(launcher: None) -> None:
    """Also with --checkpoint-verify size: what is in memory is always verified."""
    mine = engine()
    save(mine, 1)
    checkpoint = kept(mine, 1).checkpoint
    assert isinstance(checkpoint, SlotCheckpoint) and checkpoint.slot is not None
    fd, size = checkpoint.slot.data, checkpoint.slot.num_bytes
    generator = torch.Generator().manual_seed(3)
    hasty = MemoryEngine(EngineOptions(io_block_bytes=BLOCK, verify_checksums=False))
    for position in [0, 9, size - 1, *torch.randint(size, (40,), generator=generator).tolist()]:
        (byte,) = os.pread(fd, 1, position)
        os.pwrite(fd, bytes([byte ^ 1 << position % 8]), position)
        with pytest.raises(CheckpointDamagedError, match=r"^slot 0 of host memory"):
            load(hasty, checkpoint)
        os.pwrite(fd, bytes([byte]), position)
    load(hasty, checkpoint)


def test_a_rank_that_no_launcher_has_forked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    alone = engine()
    with pytest.raises(EngineUnavailableError, match=r"--checkpoint-engine memory: .*restart-launch"):
        alone.check_can_save()
    alone.close()


def test_memory_that_is_not_free_is_not_taken(launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails, with the one before as it was. To have the kernel say how much is free would take it all."""
    mine = engine()
    save(mine, 1)
    mine.settle()
    monkeypatch.setattr("megatron.checkpointing.engines.memory.slot_save.available_memory", lambda: 4096)
    with pytest.raises(CheckpointSaveError, match=r"host memory for a save could not be allocated: .* GiB are free"):
        save(mine, 2)
    with pytest.raises(OSError, match="more are needed"):
        mine.reserve(1 << 40)
    assert steps(mine) == [1]
    load(mine, kept(mine, 1).checkpoint)


@pytest.mark.slow
def test_a_rank_killed_at_any_instant_leaves_a_whole_save() -> None:
    """24 SIGKILLs, every second one while a slot is being written; steps go on from what is left."""
    program = "tests.unit.megatron.checkpointing.engines.memory_kills"
    done = subprocess.run(
        [sys.executable, "-m", program, "24", "5"], cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["while_writing"] >= 8, f"hardly any kill came while a slot was written: {found}"


@pytest.mark.parametrize(
    ("changed", "block_bytes", "says"),
    [
        ({}, None, ["with --save-interval 2 training waits for the rest; --save-interval 4 would fit"]),
        ({"idle_s": 2.0}, None, []),
        ({"idle_s": 0.0, "longest_idle_s": 0.0}, None, ["no --save-interval would fit"]),
        ({"idle_s": 2.0}, 300_000, ["a block of --snapshot-buffer-size takes 0.300 s"]),
        ({"idle_s": 2.0}, 200_000, []),
        ({"at_once_bytes": 0}, 300_000, []),
        ({"idle_s": None, "longest_idle_s": None}, 300_000, []),
        ({"bytes_per_s": 0.0}, 300_000, []),
    ],
)
def test_it_is_told_why_training_waited_for_copies(
    changed: dict[str, float | None], block_bytes: int | None, says: list[str]
) -> None:
    figures = {"at_once_bytes": 1, "idle_s": 0.5, "longest_idle_s": 0.2, "bytes_per_s": 1e6, **changed}
    found = why_training_waited(Sent(1_000_000, [], figures, {}), 2, 2, block_bytes)
    assert len(found) == len(says) and all(part in text for part, text in zip(says, found, strict=True))
