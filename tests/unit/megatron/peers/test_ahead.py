"""What a spare fetches for the place of a host that may be lost, and hands over to the rank that starts there."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.checkpointing.engines.memory.early_copy import EarlyCopy, start_early_copy
from megatron.net.free_port import free_port
from megatron.peers import ahead
from megatron.peers.client import MEMBERS_VARIABLE, VARIABLE, Peer
from megatron.peers.holder import Holder
from megatron.peers.memory_slots import held_slots, hold_slots, let_go_of_slots
from megatron.peers.wire import Channel, PeerError
from restart_trace.recorder import untraced_operation
from tests.unit.megatron.peers.test_copies import (
    DEADLINE_S,
    RECORD,
    SAVED,
    Host,
    content,
    fill,
    liar,
    rank_and_holder,
    record_of,
)

KEY = (1, 1, 2, 0, 0, 0)
OP = untraced_operation()


class Spare:
    """A host that waits, with empty slots. Its holder serves on a thread of this process, which is its rank, too."""

    def __init__(self) -> None:
        hold_slots(1)
        ((*self.slots,),) = held_slots() or [[]]
        listening = socket.create_server(("127.0.0.1", 0))
        self.holder = Holder(self.slots, [], "launch0")
        threading.Thread(target=self.holder.serve, args=([listening],), daemon=True).start()
        self.peer = Peer(os.uname().nodename, *listening.getsockname())
        self.ahead = self.holder.ahead
        self.ahead.wait()

    def start(self, key: Any = KEY) -> EarlyCopy | None:
        """A rank that starts here, and could ask no other host."""
        os.environ[MEMBERS_VARIABLE] = f'[["{self.peer.host}", "127.0.0.1", {self.peer.port}]]'
        return start_early_copy(key, 0, DEADLINE_S)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    yield from rank_and_holder(monkeypatch)


@pytest.fixture
def spare(hosts: list[Host]) -> Iterator[Spare]:
    made = Spare()
    os.environ[VARIABLE] = f"127.0.0.1:{made.peer.port}"
    yield made
    let_go_of_slots()
    os.environ.pop(MEMBERS_VARIABLE, None)


def test_the_rank_gets_what_was_fetched_before_it_was_there(hosts: list[Host], spare: Spare) -> None:
    gone = Peer("gone", "127.0.0.1", free_port())
    spare.ahead.expect(0, [gone, hosts[1].peer])
    copy = spare.start()
    assert copy is not None and copy.take("s2", OP) == str(hosts[1].peer)
    first, second = spare.slots
    record = first.record()
    assert record is not None and (record["save"], first.num_bytes) == ("s2", 300_000)
    assert os.pread(first.data, 300_000, 0) == content(300_000, 2)
    assert second.record() is None


def test_nothing_was_fetched_of_a_rank_that_nobody_has_saves_of(hosts: list[Host], spare: Spare) -> None:
    spare.ahead.expect(1, [hosts[1].peer])
    copy = spare.start()
    assert copy is not None and copy.take("s2", OP) is None


def test_the_save_of_another_place_is_not_taken(hosts: list[Host], spare: Spare) -> None:
    """As after a change of the layout: rank 0 is another part of the model."""
    spare.ahead.expect(0, [hosts[1].peer])
    copy = spare.start((1, 1, 2, 0, 0, 1))
    assert copy is not None and copy.take("s2", OP) is None
    assert all(slot.record() is None for slot in spare.slots)


def test_a_host_with_saves_of_its_own_keeps_them(hosts: list[Host], spare: Spare) -> None:
    fill(spare.slots[0], content(1000), "s9")
    spare.ahead.expect(0, [hosts[1].peer])
    assert spare.ahead.fetches == {} and (spare.slots[0].record() or {})["save"] == "s9"


class Stalled:
    """A peer that stops in the middle of sending a save, until the test is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.over = threading.Event(), threading.Event()
        monkeypatch.setattr(ahead, "_ANSWER_S", 1e6)  # whatever ends, no deadline has ended it
        monkeypatch.setattr(ahead, "ask", lambda *_, **__: {"record": record_of(SAVED, "s1")})
        self.peer = liar(self._answer)

    def _answer(self, connected: socket.socket) -> None:
        connected.sendall(RECORD + SAVED[:9])
        self.began.set()
        self.over.wait()


@pytest.fixture
def stalled(spare: Spare, monkeypatch: pytest.MonkeyPatch) -> Iterator[ahead.Fetch]:
    """The fetch of `spare` from a stalled peer."""
    peer = Stalled(monkeypatch)
    spare.ahead.expect(0, [peer.peer])
    assert peer.began.wait(DEADLINE_S)
    yield spare.ahead.fetches[0]
    peer.over.set()


def is_over(fetch: ahead.Fetch) -> bool:
    return fetch.over.is_set() and not fetch.thread.is_alive()


def test_a_load_that_wants_no_copy_ends_the_fetch(spare: Spare, stalled: ahead.Fetch) -> None:
    copy = spare.start()
    assert copy is not None and not is_over(stalled)
    copy.close()
    assert is_over(stalled) and all(slot.record() is None for slot in spare.slots)


@pytest.mark.parametrize("saved", [False, True])
def test_a_rank_that_fetches_nothing_ends_the_fetch(spare: Spare, stalled: ahead.Fetch, saved: bool) -> None:
    if saved:
        fill(spare.slots[1], content(1000), "s9")
    assert spare.start(KEY if saved else None) is None
    assert is_over(stalled)
    spare.ahead.expect(0, [])
    assert spare.ahead.fetches == {}, "its slots are the rank's from now on"


def test_a_rank_that_ends_while_it_waits_ends_the_fetch(spare: Spare, stalled: ahead.Fetch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        rank = socket.create_connection(listening.getsockname())
        connected, _ = listening.accept()
    rank.close()
    with Channel(connected, DEADLINE_S) as channel, pytest.raises(PeerError):
        spare.ahead.hand_over(0, channel)
    assert is_over(stalled)


def test_who_is_told_to_wait_again_drops_what_it_fetched(spare: Spare, stalled: ahead.Fetch) -> None:
    spare.ahead.wait()
    assert is_over(stalled) and spare.ahead.fetches == {}
