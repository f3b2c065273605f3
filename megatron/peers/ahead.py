"""Fetches copies ahead: a spare gets the newest saves of a host that is silent, before that host counts as lost.

The coordinator says which node this spare would replace. The spare fetches the newest copies of the saves of that
node's ranks into the slots of its own ranks, while the coordinator still waits for the silent host. A rank that starts
here asks for the copy that was fetched for it, and seals the slot; until it has the answer, it must not use its slots.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

from megatron.fileio.host_memory import available_memory
from megatron.peers.client import Peer, ask, fetch
from megatron.peers.memory_slots import SLOTS_PER_RANK, Slot
from megatron.peers.wire import Channel, PeerError, key_of
from restart_trace.clock import now_ns

_ANSWER_S = 10.0  # how long a peer may say nothing
_AT_WORK_S = 0.25  # how often a rank that waits is told that something is being done


class Fetch:
    """Fetches the newest copy of a rank's save into a slot, on a thread of its own; it does not seal the slot.

    `over` is set when nothing writes to the slot any more. `found`: the answer to the rank; None without a copy.
    """

    def __init__(self, rank: int, slot: Slot, holders: Sequence[Peer]) -> None:
        self._rank = rank
        self._slot = slot
        self._holders = holders
        self._lock = threading.Lock()  # of the two below
        self._ended = False
        self._channel: Channel | None = None
        self.over = threading.Event()
        self.found: dict[str, Any] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def end(self) -> None:
        """When this returns, it is over."""
        with self._lock:
            self._ended = True
            channel = self._channel
        if channel is not None:  # else it writes nothing any more
            channel.abort()
            self.thread.join()
        self.over.set()

    def _run(self) -> None:
        for peer in self._holders:
            # A rank that finds nothing here asks them all once more, and tells what is wrong.
            with contextlib.suppress(PeerError, OSError):
                record = ask(peer, _ANSWER_S, ask="newest", rank=self._rank).get("record")
                if record is None or self._ended:
                    continue
                began_ns, save, key = now_ns(), str(record["save"]), key_of(record)
                record = fetch(peer, save, key, self._room, _ANSWER_S, self._connected)
                self.found = {"record": record, "peer": peer, "began_ns": began_ns, "ended_ns": now_ns()}
                break
        self.over.set()

    def _room(self, num_bytes: int) -> memoryview:
        """Raises OSError if there is no memory for it."""
        growth, free = num_bytes - self._slot.num_bytes, available_memory()
        if growth > free:  # the kernel would not refuse, but kill a process
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        if growth > 0:
            self._slot.resize(num_bytes)
        return memoryview(mmap.mmap(self._slot.data, num_bytes))

    def _connected(self, channel: Channel) -> None:
        with self._lock:
            self._channel = channel
            if self._ended:
                channel.abort()


class Ahead:
    """The fetches for the ranks of this host. `own`: the slots of these ranks, by local rank."""

    def __init__(self, own: Sequence[Slot]) -> None:
        self._own = own
        self.fetches: dict[int, Fetch] = {}  # by local rank, until one is handed over or dropped
        self._waits = False  # no rank was started here since this host was told to wait
        self._lock = threading.Lock()

    def wait(self) -> None:
        """No rank runs here: what was fetched is dropped."""
        self._end_all()
        with self._lock:
            self._waits = True

    def expect(self, node_rank: int, holders: Sequence[Peer]) -> None:
        """Fetch what the ranks of that node would load, each from the first of `holders` that has it."""
        self._end_all()
        with self._lock:
            ranks = len(self._own) // SLOTS_PER_RANK if self._waits else 0
            for local_rank in range(ranks):
                slots = self._own[local_rank * SLOTS_PER_RANK :][:SLOTS_PER_RANK]
                if all(slot.record() is None for slot in slots):
                    self.fetches[local_rank] = Fetch(node_rank * ranks + local_rank, slots[0], holders)

    def hand_over(self, local_rank: int, channel: Channel) -> None:
        """Tell a rank what was fetched for it, once that is there. Nothing writes to its slots any more then."""
        with self._lock:
            self._waits = False
            under_way = self.fetches.get(local_rank)
        if under_way is None:
            channel.tell(found=None)
            return
        try:
            while not under_way.over.wait(_AT_WORK_S):
                channel.tell(at_work=True)
        except PeerError:  # the slots are those of another process soon
            under_way.end()
            raise
        with self._lock:
            self.fetches.pop(local_rank, None)
        channel.tell(found=under_way.found)

    def drop(self, local_rank: int) -> None:
        """What was fetched for a rank is not wanted. Nothing writes to its slots any more."""
        with self._lock:
            self._waits = False
            dropped = self.fetches.pop(local_rank, None)
        if dropped is not None:
            dropped.end()

    def _end_all(self) -> None:
        with self._lock:
            ended, self.fetches = self.fetches, {}
        for each in ended.values():
            each.end()
