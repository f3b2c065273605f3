"""Fetches the copy of a rank's save from another host while the process of the rank still starts.

A rank that starts on a host without its save, as a replacement of a lost one, will load such a copy. Which save all
ranks load is agreed later, once they are connected; this module fetches the newest save of a holder, into a slot of
this rank, concurrently with the rest of the start-up. After a wrong guess the load fetches the right save.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron.checkpointing.engines.errors import CheckpointDamagedError, CheckpointSaveError
from megatron.checkpointing.engines.memory.slot_save import SlotMemory
from megatron.peers.client import Peer, ask, fetch, own_peer, take_members
from megatron.peers.memory_slots import Slot, held_slots
from megatron.peers.wire import Channel, Key, PeerError, key_of
from restart_trace.clock import now_ns
from restart_trace.cycles import is_restart_in_place
from restart_trace.recorder import Operation

_DROP_S = 10.0  # time for this host's process to end a fetch


class EarlyCopy:
    """Fetches a save on a thread, from the first of `holders` that has one; starts when it is created.

    `take` or `close` ends it. The slot counts as empty until `take` has sealed it.
    """

    def __init__(
        self, slot: Slot, key: Key, holders: Sequence[Peer], deadline_s: float, host: tuple[Peer, int] | None = None
    ) -> None:
        """`host`: the process of this host, which may already have fetched the save, and the local rank."""
        self._slot = slot
        self._host = host
        self._key = key
        self._deadline_s = deadline_s
        self._record: Mapping[str, Any] | None = None  # record of the save in the slot
        self._save: str | None = None  # name of the save that is fetched
        self._peer: Peer | None = None  # its holder
        self._problem: str | None = None
        self._chosen = threading.Event()  # set once a save was chosen, or none was found
        self._lock = threading.Lock()  # protects the two below
        self._closed = False
        self._channel: Channel | None = None
        self._began_ns = self._ended_ns = 0
        self._thread = threading.Thread(target=self._run, args=(holders,), name="early-copy", daemon=True)
        self._thread.start()

    def take(self, save: str, op: Operation) -> str | None:
        """Wait until `save` is in the slot, verified and sealed. Returns its holder; None if another save was fetched.

        Ends the fetch of another save. A save is returned only once. `op`: the load that waits for it. Raises
        CheckpointDamagedError naming the peer if it did not send an undamaged copy.
        """
        if self._closed:
            return None
        with op.span("load", "download"):
            self._chosen.wait()
            if self._save != save:
                self.close()
                return None
            self._thread.join()
            self._closed = True
            if self._problem is not None:
                raise CheckpointDamagedError(self._problem)
            record, peer = self._record, self._peer
            assert record is not None and peer is not None
            self._slot.resize(record["file"]["num_bytes"])
            self._slot.seal(record)
        file = record["file"]
        fields = {"file": file["name"], "num_bytes": file["num_bytes"], "thread": self._thread.name}
        op.add("load", "download", self._began_ns, self._ended_ns, blocking=False, **fields)
        return str(peer)

    def close(self) -> None:
        """End the fetch. Nothing writes to the slot afterwards."""
        with self._lock:
            self._closed = True
            if self._channel is not None:
                self._channel.abort()
        if self._host is not None and self._thread.is_alive():
            _drop(*self._host)
        self._thread.join()

    def _run(self, holders: Iterable[Peer]) -> None:
        try:
            if self._was_fetched_ahead():
                return
            self._peer, self._save = self._first_with_a_save(holders)
            self._chosen.set()
            if self._peer is not None and self._save is not None:
                self._began_ns = now_ns()
                self._record = fetch(self._peer, self._save, self._key, self._room, self._deadline_s, self._connected)
                self._ended_ns = now_ns()
        except (PeerError, CheckpointSaveError, OSError) as error:
            self._problem = str(error)
        finally:
            self._chosen.set()

    def _was_fetched_ahead(self) -> bool:
        """Whether this host fetched a save of this rank while it was a spare. Waits for it if it is still fetched."""
        if self._host is None:
            return False
        own, local_rank = self._host
        try:
            found = ask(own, self._deadline_s, ask="hand_over", rank=local_rank).get("found")
        except PeerError:
            return False
        if found is None or key_of(found["record"]) != self._key:
            return False
        self._record, self._peer, self._save = found["record"], Peer(*found["peer"]), found["record"]["save"]
        self._began_ns, self._ended_ns = found["began_ns"], found["ended_ns"]
        return True

    def _first_with_a_save(self, holders: Iterable[Peer]) -> tuple[Peer | None, str | None]:
        for peer in holders:
            if self._closed:
                break
            try:
                record = ask(peer, self._deadline_s, ask="newest", key=self._key).get("record")
            except PeerError:
                continue  # reported by the ranks that need that host
            if record is not None:
                return peer, str(record["save"])
        return None, None

    def _room(self, num_bytes: int) -> memoryview:
        memory = SlotMemory(self._slot)
        memory.make_room(num_bytes)
        return memory.view(num_bytes)

    def _connected(self, channel: Channel) -> None:
        with self._lock:
            self._channel = channel
            if self._closed:
                channel.abort()


def _drop(own: Peer, local_rank: int) -> None:
    """Let the process of this host end what it fetches for a rank."""
    with contextlib.suppress(PeerError):  # the process has ended, and its fetches with it
        ask(own, _DROP_S, ask="drop", rank=local_rank)


def start_early_copy(key: Key | None, local_rank: int, deadline_s: float) -> EarlyCopy | None:
    """Begin to fetch the save of the coordinates `key`, if this host has no save of them and others may have one.

    Called once, before this rank is connected to the others. `key`: None if no save in memory will be loaded.
    `deadline_s`: --peer-timeout.
    """
    members, own, held = take_members(), own_peer(), held_slots()
    # In the first start of a launch there are no saves in memory.
    if not is_restart_in_place(os.environ) or own is None or held is None:
        return None
    records = [slot.record() for mine in held for slot in mine]
    free = [slot for slot in held[local_rank] if slot.record() is None]
    if key is None or not free or any(record is not None and key_of(record) == key for record in records):
        _drop(own, local_rank)
        return None
    places = [(member.address, member.port) for member in members]
    here = places.index((own.address, own.port))
    # Hosts hold copies of their neighbours' saves (megatron.peers.placement).
    near = sorted(range(len(members)), key=lambda node: abs(node - here))
    return EarlyCopy(free[0], key, [members[node] for node in near if node != here], deadline_s, (own, local_rank))
