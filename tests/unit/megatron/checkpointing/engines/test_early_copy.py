"""The copy that a rank on a new host fetches while it starts: the right one, another one, a peer that does badly."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.checkpointing.engines.errors import CheckpointDamagedError
from megatron.checkpointing.engines.memory.early_copy import EarlyCopy, start_early_copy
from megatron.net.free_port import free_port
from megatron.net.secret import VARIABLE as SECRET_VARIABLE
from megatron.peers.client import MEMBERS_VARIABLE, Peer
from megatron.peers.memory_slots import Slot, held_slots, new_slots
from restart_trace.recorder import untraced_operation
from tests.unit.megatron.peers.test_copies import DEADLINE_S, RECORD, SAVED, Host, content, liar, rank_and_holder
from tests.unit.trace_helpers import SECRET

KEY = (1, 1, 2, 0, 0, 0)
OP = untraced_operation()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    yield from rank_and_holder(monkeypatch)


@pytest.fixture(autouse=True)
def in_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)


@pytest.fixture
def slot() -> Iterator[Slot]:
    ((one, other),) = new_slots(1)
    yield one
    one.close()
    other.close()


def early(slot: Slot, *peers: Peer, key: Any = KEY, deadline_s: float = DEADLINE_S) -> EarlyCopy:
    return EarlyCopy(slot, key, peers, deadline_s)


def test_the_newest_is_fetched_and_sealed_when_it_is_taken(hosts: list[Host], slot: Slot) -> None:
    gone = Peer("gone", "127.0.0.1", free_port())
    copy = early(slot, gone, hosts[1].peer)
    copy._thread.join(DEADLINE_S)
    assert slot.record() is None, "nobody has asked for it yet"
    assert copy.take("s2", OP) == str(hosts[1].peer)
    record = slot.record()
    assert record is not None and (record["save"], slot.num_bytes) == ("s2", 300_000)
    with open(f"/proc/self/fd/{slot.data}", "rb") as file:
        assert file.read() == content(300_000, 2)
    assert copy.take("s2", OP) is None, "it is given once"
    copy.close()
    assert slot.record() is not None


def test_another_save_than_all_ranks_load_is_dropped(hosts: list[Host], slot: Slot) -> None:
    assert early(slot, hosts[1].peer).take("s1", OP) is None
    assert slot.record() is None


def test_nobody_has_a_save_of_these_coordinates(hosts: list[Host], slot: Slot) -> None:
    assert early(slot, hosts[1].peer, key=(1, 1, 2, 0, 0, 1)).take("s2", OP) is None


class Stalled:
    """A peer that tells of a save, and stops in the middle of sending it."""

    def __init__(self) -> None:
        self.over, self.began = threading.Event(), threading.Event()
        self.peer = liar(self._answer)

    def _answer(self, connected: Any) -> None:
        connected.sendall(RECORD + SAVED[:9])
        self.began.set()
        self.over.wait()


def test_a_peer_that_stalls_is_named_within_the_deadline(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    stalled = Stalled()
    monkeypatch.setattr(EarlyCopy, "_first_with_a_save", lambda self, holders: (holders[0], "s1"))
    with pytest.raises(CheckpointDamagedError, match=r"^liar \S+ is stalled: it said nothing for 2 s"):
        early(slot, stalled.peer, deadline_s=2.0).take("s1", OP)
    stalled.over.set()
    assert slot.record() is None


def test_a_fetch_under_way_is_ended_at_once(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load from storage must not wait for a peer."""
    stalled = Stalled()
    monkeypatch.setattr(EarlyCopy, "_first_with_a_save", lambda self, holders: (holders[0], "s1"))
    copy = early(slot, stalled.peer, deadline_s=1e6)
    assert stalled.began.wait(DEADLINE_S)
    copy.close()
    stalled.over.set()
    assert not copy._thread.is_alive() and slot.record() is None


def test_it_begins_only_where_the_host_has_nothing(hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = hosts

    def begun(restart: str) -> EarlyCopy | None:
        one.process.tell_members([list(one.peer), list(other.peer)])
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        return start_early_copy(KEY, 0, DEADLINE_S)

    os.environ.update(one.variables)  # this process is a rank of that host
    assert held_slots() is not None
    assert begun("1") is None, "its own slots have it"
    for slot in one.slots:
        slot.unseal()
    assert begun("0") is None, "nobody has anything yet"
    copy = begun("1")
    assert copy is not None and copy.take("s2", OP) == str(other.peer)
    assert MEMBERS_VARIABLE not in os.environ
