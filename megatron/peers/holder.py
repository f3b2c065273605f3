"""The process of a host that holds copies of other hosts' saves, and sends copies of its own host's saves to them.

The launcher's agent forks it and stays single-threaded itself. It inherits the slots of the ranks of its host, so it
sends a save without the rank that made it, and goes on when that is killed. It ends with the agent, and its memory,
which has no name, with it.

A copy lies in one of two slots of its coordinates (tp, pp, dp). It is sealed, and thereby there, once each of its
extents has been received and verified; until then the slot holds nothing. The sender names the save that must be kept.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.fileio.host_memory import available_memory
from megatron.net.acceptor import Acceptor
from megatron.net.handshake import COPIES
from megatron.net.secret import required_secret
from megatron.peers.ahead import Ahead
from megatron.peers.client import Peer, ask
from megatron.peers.memory_slots import Slot, new_slots
from megatron.peers.pacing import Pacing
from megatron.peers.rdma import ports_of_nccl
from megatron.peers.traffic import HELD_NS, Copy, StepTimes, Traffic
from megatron.peers.wire import (
    Channel,
    Compressed,
    Key,
    PeerError,
    connect,
    extents_of,
    file_size,
    file_summary,
    key_of,
    widths_of,
)
from megatron.processes.telling import tell

_AT_WORK = 0.25  # of its deadline: how often an asker that waits is told that something is being done
_QUESTION_S = 10.0  # from a connection to its question
_PREPARE_S = 1.0  # between a spare's questions how much memory hosts that train have
_SUMMARY = ("save", "step", "tag", "directory", "layout", "place", "model")


class _Copies:
    """Two slots for the saves of one rank of another host."""

    def __init__(self) -> None:
        (self.slots,) = new_slots(1)
        self.lock = threading.Lock()  # held by the one connection that writes
        self._views: dict[int, tuple[int, memoryview]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(slot.num_bytes for slot in self.slots)

    def next(self, keep: str | None) -> Slot:
        """The slot for the next copy: not that of `keep`; of two the one that holds nothing, or what is older."""
        records = [(slot, slot.record()) for slot in self.slots]
        free = [(slot, record) for slot, record in records if record is None or record.get("save") != keep]
        return min(free, key=lambda found: -1 if found[1] is None else found[1]["step"])[0]

    def view(self, slot: Slot) -> memoryview:
        """Its memory, mapped once: pages are faulted in once."""
        size, view = self._views.get(slot.data, (0, memoryview(b"")))
        if size != slot.num_bytes:
            size = slot.num_bytes
            view = memoryview(mmap.mmap(slot.data, size))
            self._views[slot.data] = (size, view)
        return view

    def close(self) -> None:
        self._views.clear()
        for slot in self.slots:
            slot.close()


class Holder:
    """Answers connections of this launch, each on a thread of its own.

    `own`: the slots of this host's ranks, one after the other. `times`: what each of the ranks tells of its steps.
    """

    def __init__(self, own: list[Slot], times: Sequence[StepTimes], launch: str) -> None:
        self._own = own
        self._traffic = Traffic(times, ports_of_nccl(os.environ))
        self._launch = launch
        self.ahead = Ahead(own)  # what this host fetches while it waits as a spare
        self._copies: dict[Key, _Copies] = {}
        self._wanted: set[Key] | None = None  # coordinates that are placed here; None: nobody has said so yet
        self._spare: list[_Copies] = []  # memory without coordinates, taken while this host was a spare
        self._like: Sequence[Peer] = ()  # on a spare: whose memory its own is to be like
        self._lack: str | None = None  # why it cannot be
        self._lock = threading.Lock()  # of copies, what is wanted, and spare memory

    def serve(self, listening: Sequence[socket.socket]) -> None:
        """For ever. Raises SecretError without a secret."""
        acceptor = Acceptor(listening, required_secret(), COPIES)
        while True:
            acceptor.wait()
            for connected, _ in acceptor.accepted():
                threading.Thread(target=self._converse, args=(connected,), daemon=True).start()

    def _converse(self, connected: socket.socket) -> None:
        with Channel(connected, _QUESTION_S) as channel:
            try:
                message = channel.hear()
                self._answer(channel, message)
            except PeerError as error:
                _tell_error(channel, str(error))
            except Exception as error:  # one that asks wrongly must not end the others
                traceback.print_exc()
                _tell_error(channel, f"failed: {type(error).__name__}: {error}")

    def _answer(self, channel: Channel, message: Mapping[str, Any]) -> None:
        if message.get("launch") != self._launch:
            raise PeerError("belongs to another launch")
        match message.get("ask"):
            case "list":
                channel.tell(kept=self._listed(), num_bytes=self._held_bytes())
            case "reserve":
                self._reserve([(tuple(key), int(size)) for key, size in message["copies"]])
                channel.tell(done=True)
            case "forget":
                self._forget(message.get("save"))
                channel.tell(done=True)
            case "sizes":
                slots = [slot.num_bytes for slot in self._own]
                channel.tell(slots=slots, copies=self._sizes(), lack=self._lack)
            case "expect":
                self.ahead.expect(int(message["node_rank"]), [Peer(*peer) for peer in message["holders"]])
            case "hand_over":
                self.ahead.hand_over(int(message["rank"]), channel)
            case "drop":
                self.ahead.drop(int(message["rank"]))
                channel.tell(done=True)
            case "prepare":
                self.ahead.wait()
                self._like = [Peer(*member) for member in message["like"]]
                threading.Thread(target=self._prepare, args=(self._like,), daemon=True).start()
            case "send":
                self._send(channel, message)
            case "put":
                self._take(channel, message)
            case "get":
                self._give(channel, message)
            case "newest":
                key, rank = message.get("key"), message.get("rank")
                channel.tell(record=self._newest(None if key is None else tuple(key), rank))
            case other:
                raise PeerError(f"does not know the question {other!r}")

    # What is here

    def _all_copies(self) -> dict[Key, _Copies]:
        with self._lock:
            return dict(self._copies)

    def _sealed(self) -> Iterator[tuple[Slot, dict[str, Any]]]:
        """Every slot of this process that holds a save: of this host's ranks, and copies."""
        slots = [*self._own, *(slot for copies in self._all_copies().values() for slot in copies.slots)]
        for slot in slots:
            record = slot.record()
            if record is not None:
                yield slot, record

    def _listed(self) -> list[dict[str, Any]]:
        return [_summary(record) for _, record in self._sealed()]

    def _newest(self, key: Key | None, rank: int | None) -> dict[str, Any] | None:
        """What is told of the newest save of these coordinates, or of a rank; None if there is none."""
        found = [it for _, it in self._sealed() if (key_of(it) == key if rank is None else it.get("rank") == rank)]
        return _summary(max(found, key=lambda record: record["step"])) if found else None

    def _forget(self, save: str | None) -> None:
        """The copies of a save; None: all copies."""
        for copies in self._all_copies().values():
            for slot in copies.slots:
                record = slot.record()
                if record is not None and save in (None, record.get("save")):
                    slot.unseal()

    def _reserve(self, copies: list[tuple[Key, int]]) -> None:
        """Take the memory for the copies of these coordinates, of so many bytes each. Raises PeerError.

        Copies of others stay until one that belongs here is complete: training may have to go back to them.
        """
        self._take_memory(copies)
        with self._lock:
            self._wanted, self._lack = {key for key, _ in copies}, None
            unused, self._spare = self._spare, []
        for one in unused:
            one.close()

    def _sizes(self) -> list[int]:
        """Of a slot, by the coordinates that copies are held of."""
        return [min(slot.num_bytes for slot in copies.slots) for copies in self._all_copies().values()]

    def _held_bytes(self) -> int:
        with self._lock:
            return sum(copies.num_bytes for copies in [*self._copies.values(), *self._spare])

    def _prepare(self, like: Sequence[Peer]) -> None:
        """On a spare: take the memory that a host which trains has for saves, once one has; less if there is less.

        Training then need not wait for it when this host takes a place. `like`: those hosts', asked in turn.
        """
        for peer in itertools.cycle(like):
            if self._like is not like or self._wanted is not None or self._spare:
                return
            with contextlib.suppress(PeerError):  # it is lost, or begins
                sizes = ask(peer, _QUESTION_S, launch=self._launch, ask="sizes")
                if sizes["copies"] and self._has_memory_for(sizes["slots"], sizes["copies"], peer.host):
                    self._take_spare_memory(max(sizes["slots"]), sizes["copies"])
            time.sleep(_PREPARE_S)

    def _has_memory_for(self, slots: Sequence[int], copies: Sequence[int], host: str) -> bool:
        """Whether this host could keep what that one does."""
        growth = 2 * sum(copies) + max(0, sum(slots) - sum(slot.num_bytes for slot in self._own))
        free = available_memory()
        self._lack = None
        if growth > free:
            self._lack = (
                f"saves in memory and copies would take {growth / 2**30:.2f} GiB more, as on {host}, and "
                f"{free / 2**30:.2f} GiB are free"
            )
        return self._lack is None

    def _take_spare_memory(self, slot_bytes: int, copies: Sequence[int]) -> None:
        with self._lock:
            for size in copies:
                if 2 * size > available_memory():
                    return
                self._spare.append(_Copies())
                for slot in self._spare[-1].slots:
                    slot.resize(size)
        for slot in self._own:
            growth = slot_bytes - slot.num_bytes
            if slot.record() is None and 0 < growth <= available_memory():
                slot.resize(slot_bytes)

    def _take_memory(self, copies: list[tuple[Key, int]]) -> None:
        with self._lock:
            growth = 0
            for key, _ in copies:
                if key not in self._copies and self._spare:
                    self._copies[key] = self._spare.pop()
            for key, size in copies:
                slots = self._copies[key].slots if key in self._copies else []
                growth += 2 * size - sum(min(size, slot.num_bytes) for slot in slots)
            free = available_memory()
            if growth > free:
                raise PeerError(
                    f"cannot hold copies: {growth / 2**30:.2f} GiB more are needed and {free / 2**30:.2f} GiB are free"
                )
            for key, size in copies:
                if key not in self._copies:
                    self._copies[key] = _Copies()
                for slot in self._copies[key].slots:
                    if slot.num_bytes < size:
                        slot.resize(size)

    def _copies_of(self, key: Key, size: int) -> _Copies:
        """Those of these coordinates. A process that has taken the place of one that was killed makes room for them."""
        with self._lock:
            reserved, anew = self._copies.get(key), self._wanted is None
        if reserved is not None:
            return reserved
        if not anew:
            raise PeerError(f"holds no copies of {key}")
        self._take_memory([(key, size)])
        return self._all_copies()[key]

    def _drop_others(self) -> None:
        """Give back the memory of copies that are not placed here any more."""
        with self._lock:
            gone = [key for key in self._copies if self._wanted is not None and key not in self._wanted]
            dropped = [self._copies.pop(key) for key in gone]
        for copies in dropped:
            with copies.lock:
                copies.close()

    # Sending

    def _send(self, channel: Channel, message: Mapping[str, Any]) -> None:
        """Copy the save of a slot to peers, and say what came of it; the asker hears that we are at work meanwhile."""
        slot, peers = self._own[message["slot"]], [Peer(*peer) for peer in message["peers"]]
        record = slot.record()
        if record is None:
            raise PeerError(f"was to send slot {message['slot']}, which holds nothing")
        errors: dict[Peer, str] = {}
        copies: dict[Peer, Copy] = {}
        compressed: list[Compressed] = []
        pacing = message.get("interleave")

        def send(peer: Peer) -> None:
            try:
                if pacing is not None:
                    copies[peer] = self._traffic.begin(peer.address, peer.port, Pacing(*pacing))
                packed = _send_copy(peer, slot, record, message, copies.get(peer))
                compressed.extend([] if packed is None else [packed])
            except PeerError as error:
                errors[peer] = f"{peer} {error}"
            except Exception as error:  # whoever asked waits to hear of it
                traceback.print_exc()
                errors[peer] = f"{peer}: {type(error).__name__}: {error}"

        threads = [threading.Thread(target=send, args=(peer,), daemon=True) for peer in peers]
        for thread in threads:
            thread.start()
        every_s = _AT_WORK * float(message["timeout_s"])
        for thread in threads:
            thread.join(every_s)
            while thread.is_alive():
                try:
                    channel.tell(at_work=True)
                except PeerError:  # the rank has ended: its successor's copy is not to wait until this one is let go
                    for copy in list(copies.values()):
                        copy.asked_ns = 0
                    raise
                thread.join(every_s)
        sent = file_size(record) * (len(peers) - len(errors))
        interleaved = self._traffic.statistics(list(copies.values())) if copies else {}
        total = Compressed(*map(sum, zip(*compressed, strict=True)))._asdict() if compressed else {}
        failed = [errors[peer] for peer in peers if peer in errors]
        channel.tell(bytes=sent, errors=failed, interleaved=interleaved, compressed=total)

    # Taking and giving

    def _take(self, channel: Channel, message: Mapping[str, Any]) -> None:
        """Receive a copy from a peer."""
        record = message["record"]
        extents_of(record)
        key, size = key_of(record), file_size(record)
        copies = self._copies_of(key, size)
        channel.deadline_s = float(message["timeout_s"])
        channel.notice_loss()
        if not copies.lock.acquire(timeout=channel.deadline_s):
            raise PeerError(f"is still taking another copy of {key}")
        try:
            slot = copies.next(message.get("keep"))
            if size > slot.num_bytes:
                raise PeerError(f"has {slot.num_bytes} bytes for a copy of {key}, and {size} were announced")
            slot.unseal()
            channel.tell(go=True)
            compressed = message.get("compressed") is True
            if not compressed:
                channel.hear()  # what the whole file follows
            channel.receive_file(copies.view(slot), record, compressed)
            slot.seal(record)
        finally:
            copies.lock.release()
        channel.tell(done=True)
        self._drop_others()

    def _give(self, channel: Channel, message: Mapping[str, Any]) -> None:
        """Send what is asked for: a save that is sealed here, as it is, or `parts` of it. Who gets it verifies it."""
        key = tuple(message["key"])
        for slot, record in self._sealed():
            if record.get("save") == message["save"] and key_of(record) == key:
                size = file_size(record)
                widths = widths_of(record)
                whole = [(0, size)] if widths is None else [extent[:2] for extent in extents_of(record)]
                parts = [(int(start), int(stop)) for start, stop in message.get("parts", whole)]
                if any(not 0 <= start <= stop <= size for start, stop in parts):
                    raise PeerError(f"was asked for bytes beyond the {size} that it has of {key}")
                if widths is None:
                    channel.send_file({"record": record}, slot.data, parts)
                else:
                    channel.tell(record=record, compressed=True)
                    channel.send_blocks(slot.data, parts, widths)
                return
        raise PeerError(f"does not hold {message['save']} of {key}")


def _send_copy(
    peer: Peer, slot: Slot, record: Mapping[str, Any], message: Mapping[str, Any], copy: Copy | None
) -> Compressed | None:
    """What was compressed; None: nothing. `copy` says when its bytes may go.

    Raises PeerError if the peer does not have it, verified, in the end.
    """
    deadline_s, widths = float(message["timeout_s"]), widths_of(record)
    before, compressed = None if copy is None else copy.before, None
    with connect(peer.address, peer.port, deadline_s) as channel:
        keep, launch = message.get("keep"), message["launch"]
        # A pause is no stall: the peer is told of the time for which a copy may be held.
        patience_s = deadline_s if copy is None else deadline_s + HELD_NS / 1e9
        told = {"record": record, "keep": keep, "timeout_s": patience_s, "compressed": widths is not None}
        channel.tell(launch=launch, ask="put", **told)
        channel.hear()
        if widths is None:
            channel.send_file({}, slot.data, [(0, file_size(record))], before)
        else:
            parts = [extent[:2] for extent in extents_of(record)]
            compressed = channel.send_blocks(slot.data, parts, widths, before)
        channel.hear()
    return compressed


def _summary(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: record.get(name) for name in _SUMMARY} | file_summary(record)


def _tell_error(channel: Channel, text: str) -> None:
    try:
        channel.tell(error=text)
    except PeerError:  # it has gone
        return


def run(listening: Sequence[socket.socket], own: list[Slot], times: Sequence[StepTimes], launch: str) -> None:
    """Serve until this process is ended."""
    try:
        Holder(own, times, launch).serve(listening)
    except BaseException as error:
        tell(f"[launch] error: the copies of saves cannot be served: {error!r}")
        os._exit(1)
