"""How the drill finds the newest save that launchers hold in memory, and how it damages it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.peers.client import VARIABLE as COPIES
from megatron.peers.client import ask, send_copies
from megatron.peers.memory_slots import VARIABLE, Slot, held_slots, hold_slots, let_go_of_slots
from restart_trace.schema import LOCAL_MEMORY, PEER, STORAGE
from tests.descriptors import open_descriptors
from tests.unit.megatron.peers.conftest import in_a_launch  # noqa: F401
from tests.unit.megatron.peers.test_copies import DEADLINE_S, Host, fill, two  # noqa: F401
from tests.unit.tools.restart_drill.test_faults import checkpoint
from tools.restart_drill.checkpoints import Checkpoints
from tools.restart_drill.launch import DrillError, RankLocation
from tools.restart_drill.memory_saves import LauncherMemorySaves, NodeMemorySaves, ResumeSource, newest_resume_source

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
    in_memory, checkpoints = LauncherMemorySaves(os.getpid()), Checkpoints(tmp_path)
    before = open_descriptors()
    assert in_memory.newest() is None
    with pytest.raises(DrillError, match="holds 0 complete checkpoints"):
        newest_resume_source(checkpoints, in_memory)
    for step in (6, 7):
        for mine in slots:
            seal(mine[step % 2], step)
    assert newest_resume_source(checkpoints, in_memory) == in_memory.newest() == ResumeSource(7, LOCAL_MEMORY)
    slots[1][1].unseal()
    assert in_memory.newest() == ResumeSource(6, LOCAL_MEMORY)
    seal(slots[1][1], 7, "of another run")
    assert in_memory.newest() == ResumeSource(6, LOCAL_MEMORY)
    assert not open_descriptors() - before


def test_memory_comes_before_storage_of_the_same_step_only(slots: list[list[Slot]], tmp_path: Path) -> None:
    in_memory, checkpoints = LauncherMemorySaves(os.getpid()), Checkpoints(tmp_path)
    for mine in slots:
        seal(mine[0], 6)
    checkpoint(tmp_path, 6)
    assert newest_resume_source(checkpoints, in_memory) == ResumeSource(6, LOCAL_MEMORY)
    checkpoint(tmp_path, 8)
    assert newest_resume_source(checkpoints, in_memory) == ResumeSource(8, STORAGE)
    assert newest_resume_source(checkpoints, None) == ResumeSource(8, None)
    assert newest_resume_source(checkpoints, LauncherMemorySaves(GONE)) == ResumeSource(8, STORAGE), (
        "its launcher has ended"
    )


def test_what_hosts_that_are_not_lost_hold_is_asked_of_them(two: tuple[Host, Host]) -> None:  # noqa: F811
    ranks = {dp: location_of(host, f"host{dp}", dp) for dp, host in enumerate(two)}
    for dp, (mine, other) in enumerate((two, two[::-1])):
        fill(mine.slots[0], b"1" * 1000, "s1", dp, step=1)
        ask(other.peer, DEADLINE_S, ask="reserve", copies=[((1, 1, 2, 0, 0, dp), 1000)])
        assert send_copies(mine.peer, 0, [other.peer], None, DEADLINE_S)[1] == []
        fill(mine.slots[1], b"2" * 1000, "s2", dp, step=2)  # of which there are no copies
    assert NodeMemorySaves(ranks, ()).newest() == ResumeSource(2, LOCAL_MEMORY)
    assert NodeMemorySaves(ranks, {"host1"}).newest() == ResumeSource(1, PEER)
    assert NodeMemorySaves(ranks, {"host0", "host1"}).newest() is None
    two[1].slots[1].unseal()
    assert NodeMemorySaves(ranks, ()).newest() == ResumeSource(1, LOCAL_MEMORY)
    two[1].slots[0].unseal()  # its launcher was killed, say: the copy on the other host is used
    assert NodeMemorySaves(ranks, ()).newest() == ResumeSource(1, PEER)
    with pytest.raises(
        DrillError, match="cannot read which saves are in the memory of a running node: host1 .*belongs"
    ):
        NodeMemorySaves(ranks | {1: ranks[1]._replace(launch_id="another")}, ()).newest()
    with pytest.raises(DrillError, match="host1: its ranks have recorded no process that holds saves in memory"):
        NodeMemorySaves(ranks | {1: ranks[1]._replace(copies="")}, ()).newest()


def location_of(host: Host, name: str, dp: int) -> RankLocation:
    return RankLocation(1, "boot", name, (0, 0, dp), "launch0", host.variables[COPIES])


@pytest.mark.parametrize("fault", ["truncate", "bitflip"])
def test_damage_is_to_the_last_rank_and_counts(slots: list[list[Slot]], fault: str) -> None:
    in_memory = LauncherMemorySaves(os.getpid())
    with pytest.raises(DrillError, match="no save in memory is complete on all ranks"):
        in_memory.damage(fault)
    for mine in slots:
        seal(mine[1], 6)
        seal(mine[0], 7)
    before = os.pread(slots[1][0].data, 4096, 0)
    assert in_memory.damage(fault) == "slot 2 of host memory"
    after = os.pread(slots[1][0].data, 4096, 0)
    if fault == "truncate":
        assert after == before[:2048]
    else:
        assert sum(a != b for a, b in zip(after, before, strict=True)) == 1
    assert in_memory.newest() == ResumeSource(6, LOCAL_MEMORY)
