"""Slots in host memory: what a record says, what a torn one does, who finds them, and that nothing of them is left."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator

import pytest

from megatron.peers.memory_slots import (
    VARIABLE,
    Slot,
    held_slots,
    hold_slots,
    let_go_of_slots,
    new_slots,
    slots_held_by,
)


@pytest.fixture
def slot() -> Iterator[Slot]:
    (mine,) = new_slots(1)
    yield mine[0]
    for other in mine:
        other.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Slot]]]:
    monkeypatch.delenv(VARIABLE, raising=False)
    hold_slots(2)
    found = held_slots()
    assert found is not None
    yield found
    let_go_of_slots()


def test_it_holds_what_it_was_sealed_with_until_it_is_unsealed(slot: Slot) -> None:
    assert slot.record() is None
    slot.seal({"step": 5, "text": "x" * 100_000})
    assert slot.record() == {"step": 5, "text": "x" * 100_000}
    slot.unseal()
    assert slot.record() is None
    slot.seal({"step": 6})
    assert slot.record() == {"step": 6}


def test_a_record_that_is_cut_off_or_altered_anywhere_seals_nothing(slot: Slot) -> None:
    """As a process leaves it that is killed while it writes it."""
    slot.seal({"step": 5, "name": "global_step5"})
    fd = slot.record_file
    whole = os.pread(fd, 1 << 16, 0)
    for length in range(len(whole)):
        os.ftruncate(fd, length)
        assert slot.record() is None, f"{length} of {len(whole)} bytes"
        os.pwrite(fd, whole, 0)
    for position in range(len(whole)):
        os.pwrite(fd, bytes([whole[position] ^ 4]), position)
        assert slot.record() is None, f"byte {position}"
        os.pwrite(fd, whole, 0)
    assert slot.record() == {"step": 5, "name": "global_step5"}


def test_memory_is_taken_at_once_and_given_back(slot: Slot) -> None:
    slot.resize(1 << 20)
    assert slot.num_bytes == 1 << 20 and os.fstat(slot.data).st_blocks * 512 == 1 << 20
    slot.resize(4096)
    assert slot.num_bytes == 4096 and os.fstat(slot.data).st_blocks * 512 == 4096


def test_what_a_killed_process_has_sealed_is_found_by_the_next(held: list[list[Slot]]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            found = held_slots()
            assert found is not None
            found[1][0].seal({"step": 7})
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert [[slot.record() for slot in mine] for mine in held] == [[None, None], [{"step": 7}, None]]


def test_a_process_that_only_has_the_variable_finds_none(
    held: list[list[Slot]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was started and not forked: other files may have these numbers, or none."""
    assert len(held) == 2 and all(len(mine) == 2 for mine in held)
    reader, writer = os.pipe()
    try:
        for numbers in (f"{reader},{writer},{reader},{writer}", "1000000,1000001,1000002,1000003", ""):
            with monkeypatch.context() as patch:
                patch.setenv(VARIABLE, numbers)
                assert held_slots() is None
    finally:
        os.close(reader)
        os.close(writer)


def test_nothing_of_them_has_a_name(held: list[list[Slot]]) -> None:
    before = set(os.listdir("/dev/shm"))
    held[0][0].resize(1 << 20)
    held[0][0].seal({"step": 1})
    assert not any("slot" in name for name in set(os.listdir("/dev/shm")) - before)
    path = os.readlink(f"/proc/self/fd/{held[0][0].data}")
    assert path.endswith("(deleted)") and not os.path.exists(path)


def test_from_outside_they_are_found_as_they_were_made_whatever_their_descriptors(slot: Slot) -> None:
    """Numbers of descriptors that are free are taken anew, and a mapping has a descriptor of its own."""
    slot.resize(4096)
    slot.seal({"made": "first"})
    mapped = mmap.mmap(slot.data, 4096)
    low = [os.dup(slot.data) for _ in range(64)]  # more than threads of other tests take when they are free again
    (early,) = new_slots(1)
    early[1].seal({"made": "second"})
    for fd in low:
        os.close(fd)
    (late,) = new_slots(1)
    late[0].resize(8192)
    late[0].seal({"made": "last"})
    assert late[0].data < early[0].data
    seen = slots_held_by(os.getpid())
    try:
        records = [[one.record() for one in mine] for mine in seen]
        assert records == [[{"made": "first"}, None], [None, {"made": "second"}], [{"made": "last"}, None]]
        assert [[one.num_bytes for one in mine] for mine in seen] == [[4096, 0], [0, 0], [8192, 0]]
    finally:
        for other in (*early, *late, *(one for mine in seen for one in mine)):
            other.close()
        mapped.close()
