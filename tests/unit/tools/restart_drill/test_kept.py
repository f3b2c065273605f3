"""What the drill sees of the saves that a launcher keeps in memory: which is the newest left, and damage to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.processes.memory_slots import VARIABLE, Slot, held_slots, hold_slots, let_go_of_slots
from restart_trace.schema import LOCAL_MEMORY, STORAGE
from tests.unit.tools.restart_drill.test_faults import checkpoint
from tools.restart_drill.checkpoints import Checkpoints
from tools.restart_drill.kept import KeptSaves, Left, newest_left
from tools.restart_drill.launch import DrillError

GONE = 2**22 + 1  # above what the kernel gives to any process


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Slot]]]:
    """Of two ranks, held by this process as a launcher holds them."""
    monkeypatch.delenv(VARIABLE, raising=False)
    hold_slots(2)
    found = held_slots()
    assert found is not None
    yield found
    let_go_of_slots()


def seal(slot: Slot, step: int, name: str | None = None) -> None:
    slot.unseal()
    slot.resize(4096)
    os.pwrite(slot.data, b"\1" * 4096, 0)
    slot.seal({"save": name or f"s{step}", "step": step})


def test_the_newest_save_is_one_that_all_ranks_have(slots: list[list[Slot]], tmp_path: Path) -> None:
    kept, checkpoints = KeptSaves(os.getpid()), Checkpoints(tmp_path)
    open_before = len(os.listdir("/proc/self/fd"))
    assert kept.newest_step() is None
    with pytest.raises(DrillError, match="holds 0 complete checkpoints"):
        newest_left(checkpoints, kept)
    for step in (6, 7):
        for mine in slots:
            seal(mine[step % 2], step)
    assert kept.newest_step() == 7 and newest_left(checkpoints, kept) == Left(7, LOCAL_MEMORY)
    slots[1][1].unseal()
    assert kept.newest_step() == 6
    seal(slots[1][1], 7, "of another course")
    assert kept.newest_step() == 6
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_memory_comes_before_storage_of_the_same_step_only(slots: list[list[Slot]], tmp_path: Path) -> None:
    kept, checkpoints = KeptSaves(os.getpid()), Checkpoints(tmp_path)
    for mine in slots:
        seal(mine[0], 6)
    checkpoint(tmp_path, 6)
    assert newest_left(checkpoints, kept) == Left(6, LOCAL_MEMORY)
    checkpoint(tmp_path, 8)
    assert newest_left(checkpoints, kept) == Left(8, STORAGE)
    assert newest_left(checkpoints, None) == Left(8, None)
    assert newest_left(checkpoints, KeptSaves(GONE)) == Left(8, STORAGE), "its launcher has ended"


@pytest.mark.parametrize("fault", ["truncate", "bitflip"])
def test_damage_is_to_the_last_rank_and_counts(slots: list[list[Slot]], fault: str) -> None:
    kept = KeptSaves(os.getpid())
    with pytest.raises(DrillError, match="no save in memory is whole on all ranks"):
        kept.damage(fault)
    for mine in slots:
        seal(mine[1], 6)
        seal(mine[0], 7)
    whole = os.pread(slots[1][0].data, 4096, 0)
    assert kept.damage(fault) == "slot 2 of host memory"
    after = os.pread(slots[1][0].data, 4096, 0)
    if fault == "truncate":
        assert after == whole[:2048]
    else:
        assert sum(a != b for a, b in zip(after, whole, strict=True)) == 1
    assert kept.newest_step() == 6
