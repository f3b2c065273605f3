"""The process that holds copies: what it takes, gives and refuses; peers that stall, lie or are gone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.fileio.checksums import crc32
from megatron.net.acceptor import Acceptor
from megatron.net.free_port import free_port
from megatron.net.handshake import COPIES
from megatron.net.secret import VARIABLE as SECRET_VARIABLE
from megatron.net.tls import FLAGS
from megatron.peers import holder
from megatron.peers.client import (
    VARIABLE,
    WAITING_VARIABLE,
    Peer,
    ask,
    fetch,
    fetch_parts,
    own_peer,
    send_copies,
    tell,
    tell_of_waiting,
    waiting_peers,
)
from megatron.peers.memory_slots import VARIABLE as SLOTS
from megatron.peers.memory_slots import Slot, held_slots, hold_slots, let_go_of_slots, slots_held_by
from megatron.peers.process import CopyProcess
from megatron.peers.traffic import VARIABLE as STEP_TIMES
from megatron.peers.wire import Channel, PeerError, key_of
from restart_trace.cycles import LAUNCH_ID_VARIABLE
from tests.unit.certificates import make_files
from tests.unit.trace_helpers import SECRET

LAYOUT = {"tp": 1, "pp": 1, "dp": 2}
KEY = (1, 1, 2, 0, 0, 0)
DEADLINE_S = 300.0  # of answers that come, on a busy machine too
EXTENT = 65536


def record_of(content: bytes, save: str, dp: int = 0, step: int = 1) -> dict[str, Any]:
    parts = [content[at : at + EXTENT] for at in range(0, len(content), EXTENT)]
    extents = [(len(part), f"{crc32(part):08x}") for part in parts]
    file = {"name": "rank_00000.safetensors", "num_bytes": len(content), "extents": extents}
    place = {"tp": 0, "pp": 0, "dp": dp}
    return {
        "save": save,
        "step": step,
        "layout": LAYOUT,
        "place": place,
        "rank": dp,
        "tag": save,
        "directory": "/d",
        "model": {},
        "file": file,
    }


def fill(slot: Slot, content: bytes, save: str, dp: int = 0, step: int = 1) -> dict[str, Any]:
    slot.unseal()
    slot.resize(len(content))
    os.pwrite(slot.data, content, 0)
    record = record_of(content, save, dp, step)
    slot.seal(record)
    return record


class Host:
    """A launcher with the slots of one rank, and its process for copies; all in this test's process."""

    def __init__(self) -> None:
        hold_slots(1)
        ((*self.slots,),) = held_slots() or [[]]
        self.variables = {SLOTS: os.environ[SLOTS]}
        self.process = CopyProcess("127.0.0.1")
        self.process.start(lambda: None)
        self.variables[VARIABLE] = os.environ[VARIABLE]
        own = own_peer()
        assert own is not None
        self.peer = own

    @property
    def pid(self) -> int:
        assert self.process._pid is not None
        return self.process._pid

    def close(self) -> None:
        self.process.close()
        os.environ.update(self.variables)
        let_go_of_slots()
        os.environ.pop(VARIABLE)
        os.environ.pop(STEP_TIMES, None)


@pytest.fixture
def tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Connections of this process, and of processes that it starts from now on, use TLS."""
    for variable, path in make_files(tmp_path / "tls").variables.items():
        monkeypatch.setenv(variable, path)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Host, Host]]:
    for name in (SLOTS, VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "launch0")
    one, other = Host(), Host()
    yield one, other
    one.close()
    other.close()


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def room_of(taken: bytearray) -> Callable[[int], memoryview]:
    def room(num_bytes: int) -> memoryview:
        taken.extend(bytes(num_bytes))
        return memoryview(taken)

    return room


def got(peer: Peer, save: str, dp: int = 0, deadline_s: float = DEADLINE_S) -> bytes:
    taken = bytearray()
    fetch(peer, save, (1, 1, 2, 0, 0, dp), room_of(taken), deadline_s)
    return bytes(taken)


def reserve(host: Host, size: int) -> None:
    ask(host.peer, DEADLINE_S, ask="reserve", copies=[((1, 1, 2, 0, 0, 0), size)])


def rank_and_holder(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Host]]:
    """A host whose rank has saved twice, and the one that holds its copies."""
    for name in (SLOTS, VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(LAUNCH_ID_VARIABLE, "launch0")
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    found = [Host(), Host()]
    reserve(found[1], 400_000)
    for step, save in ((1, "s1"), (2, "s2")):
        fill(found[0].slots[step % 2], content(300_000, step), save, step=step)
        assert send_copies(found[0].peer, step % 2, [found[1].peer], None, DEADLINE_S)[1] == []
    yield found
    for host in found:
        host.close()


def test_a_save_is_copied_verified_and_given_back(two: tuple[Host, Host]) -> None:
    one, other = two
    saved = content(300_001)
    reserve(other, 400_000)
    for step, save in ((1, "s1"), (2, "s2"), (3, "s3")):
        fill(one.slots[step % 2], saved + bytes([step]), save, step=step)
        keep = f"s{step - 1}" if step > 1 else None
        assert send_copies(one.peer, step % 2, [other.peer], keep, DEADLINE_S) == (300_002, [], {}, {})
        assert got(other.peer, save) == saved + bytes([step])
    assert sorted(r["save"] for r in ask(other.peer, DEADLINE_S, ask="list")["kept"]) == ["s2", "s3"]
    assert got(one.peer, "s3") == got(other.peer, "s3"), "the slots of its own ranks are given, too"
    ask(other.peer, DEADLINE_S, ask="forget", save="s3")
    with pytest.raises(PeerError, match=r"does not hold s3 of \(1, 1, 2, 0, 0, 0\)"):
        got(other.peer, "s3")
    assert got(other.peer, "s2")


def test_parts_of_a_save_are_given_where_they_belong(two: tuple[Host, Host]) -> None:
    one, other = two
    saved = content(300_001)
    fill(one.slots[0], saved, "s1")
    key, taken = (1, 1, 2, 0, 0, 0), bytearray(len(saved))
    fetch_parts(
        one.peer, "s1", key, [(5, 100_000), (200_000, 200_000), (299_990, 300_001)], memoryview(taken), DEADLINE_S
    )
    assert taken[5:100_000] == saved[5:100_000] and taken[299_990:] == saved[299_990:]
    assert not any(taken[:5]) and not any(taken[100_000:299_990])
    for parts in ([(0, 300_002)], [(-1, 5)], [(9, 8)]):
        with pytest.raises(PeerError, match="was asked for bytes beyond the 300001 that it has of"):
            fetch_parts(one.peer, "s1", key, parts, memoryview(taken), DEADLINE_S)
    with pytest.raises(PeerError, match="sends another save than s1 of"):
        fetch_parts(one.peer, "s1", key, [(0, 5)], memoryview(bytearray(300_000)), DEADLINE_S)
    with pytest.raises(PeerError, match="does not hold s1 of"):
        fetch_parts(other.peer, "s1", key, [(0, 5)], memoryview(taken), DEADLINE_S)
    (told,) = ask(one.peer, DEADLINE_S, ask="list")["kept"]
    assert told["file"] == {
        "name": "rank_00000.safetensors", "num_bytes": 300_001, "checksum": None, "states": None, "header_bytes": EXTENT
    }  # fmt: skip


def test_ranks_hear_of_hosts_on_which_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WAITING_VARIABLE, raising=False)
    assert waiting_peers() == []
    others = [Peer("node2", "10.0.0.3", 5), Peer("node3", "::1", 6)]
    monkeypatch.setenv(WAITING_VARIABLE, "")  # given back afterwards
    tell_of_waiting(others)
    assert waiting_peers() == others


@pytest.mark.slow
def test_copies_travel_with_tls(tls: None, two: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """To a peer and back, a part of one too; a process without the certificates gets nothing."""
    one, other = two
    saved = content(5_000_000)
    fill(one.slots[0], saved, "s1")
    reserve(other, len(saved))
    assert send_copies(one.peer, 0, [other.peer], None, DEADLINE_S).errors == []
    assert got(other.peer, "s1") == saved
    part = bytearray(len(saved))
    fetch_parts(other.peer, "s1", KEY, [(100_000, 3_100_000)], memoryview(part), DEADLINE_S)
    assert part[100_000:3_100_000] == saved[100_000:3_100_000] and not any(part[3_100_000:])
    for variable in FLAGS.values():
        monkeypatch.delenv(variable)
    with pytest.raises(PeerError, match="cannot be reached: the connection was closed before .*does it alone use TLS"):
        got(other.peer, "s1")


def test_what_is_to_be_kept_is_not_written_over(two: tuple[Host, Host]) -> None:
    one, other = two
    reserve(other, 1000)
    for step, keep in ((1, None), (2, "s1"), (3, "s1"), (4, "s1")):
        fill(one.slots[0], content(1000, step), f"s{step}", step=step)
        assert send_copies(one.peer, 0, [other.peer], keep, DEADLINE_S)[1] == []
    assert sorted(r["save"] for r in ask(other.peer, DEADLINE_S, ask="list")["kept"]) == ["s1", "s4"]


def test_a_spare_has_the_memory_ready_that_others_use(two: tuple[Host, Host]) -> None:
    one, other = two

    def has(host: Host, slots: list[int], num_bytes: int) -> bool:
        sizes = ask(host.peer, DEADLINE_S, ask="sizes")["slots"]
        return (sizes, ask(host.peer, DEADLINE_S, ask="list")["num_bytes"]) == (slots, num_bytes)

    fill(one.slots[0], content(70_000), "s1")
    like = [["gone", "127.0.0.1", free_port()], list(one.peer)]
    tell(other.peer.port, DEADLINE_S, ask="prepare", like=like)  # as prepare_like, which gives up after 0.1 s
    reserve(one, 100_000)  # what it is to be like is known only now
    deadline = time.monotonic() + DEADLINE_S
    while not has(other, [70_000, 70_000], 200_000):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    before = ask(other.peer, DEADLINE_S, ask="list")
    reserve(other, 100_000)
    assert ask(other.peer, DEADLINE_S, ask="list") == before, "what was ready is used"
    assert send_copies(one.peer, 0, [other.peer], None, DEADLINE_S)[1] == []
    assert got(other.peer, "s1") == content(70_000)


def test_a_spare_says_that_it_has_too_little_memory(two: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    trains = two[0]
    fill(trains.slots[0], content(70_000), "s1")
    reserve(trains, 100_000)
    monkeypatch.setattr(holder, "available_memory", lambda: 200_000)  # 270,000 are wanted
    spare = Host()
    try:
        assert spare.process.lack_of_memory() is None, "it has not been told yet of whom to ask"
        deadline = time.monotonic() + DEADLINE_S
        while (lack := spare.process.lack_of_memory()) is None:
            assert time.monotonic() < deadline
            spare.process.prepare_like([list(trains.peer)])  # which a process that is busy for 0.1 s does not hear
            time.sleep(0.02)
        assert lack == (
            f"saves in memory and copies would take 0.00 GiB more, as on {trains.peer.host}, and 0.00 GiB are free"
        )
        assert ask(spare.peer, DEADLINE_S, ask="list")["num_bytes"] == 0, "it takes none"
    finally:
        spare.close()


def test_every_flipped_bit_of_a_copy_is_found(two: tuple[Host, Host]) -> None:
    one, other = two
    saved = content(200_000)
    reserve(other, len(saved))
    fill(one.slots[0], saved, "s1")
    send_copies(one.peer, 0, [other.peer], None, DEADLINE_S)
    mine = {os.fstat(slot.data).st_ino for slot in one.slots}  # which the process of `other` has inherited, here
    with contextlib.ExitStack() as opened:
        found = [slot for rank in slots_held_by(other.pid) for slot in rank]
        for slot in found:
            opened.callback(slot.close)
        (slot,) = [slot for slot in found if slot.record() is not None and os.fstat(slot.data).st_ino not in mine]
        generator = random.Random(7)
        for position in [0, len(saved) - 1, *(generator.randrange(len(saved)) for _ in range(30))]:
            flipped = bytes([saved[position] ^ 1 << generator.randrange(8)])
            os.pwrite(slot.data, flipped, position)
            with pytest.raises(PeerError, match=r"^\S+ \(127.0.0.1:\d+\) has a damaged copy: bytes \d+ to \d+"):
                got(other.peer, "s1")
            os.pwrite(slot.data, saved[position : position + 1], position)
    assert got(other.peer, "s1") == saved


def test_a_slot_that_is_altered_after_its_seal_is_not_taken(two: tuple[Host, Host]) -> None:
    one, other = two
    reserve(other, 1000)
    fill(one.slots[0], content(1000), "s1")
    os.pwrite(one.slots[0].data, b"x", 500)
    ((_, (error,), *_)) = send_copies(one.peer, 0, [other.peer], None, DEADLINE_S)
    assert "has a damaged copy: bytes 0 to 1000" in error
    assert ask(other.peer, DEADLINE_S, ask="list")["kept"] == []


def test_what_is_refused(two: tuple[Host, Host], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = two
    fill(one.slots[0], content(1000), "s1")
    reserve(other, 500)
    assert "has 500 bytes for a copy of" in send_copies(one.peer, 0, [other.peer], None, DEADLINE_S)[1][0]
    with pytest.raises(PeerError, match="GiB more are needed and"):
        reserve(other, 1 << 50)
    with pytest.raises(PeerError, match="slot 1, which holds nothing"):
        send_copies(one.peer, 1, [other.peer], None, DEADLINE_S)
    with monkeypatch.context() as patch:
        patch.setenv(LAUNCH_ID_VARIABLE, "another")
        with pytest.raises(PeerError, match="belongs to another launch"):
            got(other.peer, "s1")


def test_strangers_get_nothing_and_cost_nothing(two: tuple[Host, Host]) -> None:
    """They know the id of the launch, which is no secret; or announce a message of 256 MiB."""
    _, other = two
    fill(other.slots[0], content(1000), "s1")
    before = resident(other.pid)
    announced = [socket.create_connection(("127.0.0.1", other.peer.port)) for _ in range(12)]
    for one in announced:
        one.sendall(struct.pack("<IQ", 256 << 20, 0).ljust(40))
    questions: list[dict[str, Any]] = [
        {"ask": "list"}, {"ask": "forget", "save": None}, {"ask": "get", "save": "s1", "key": KEY},
    ]  # fmt: skip
    for question in questions:
        with socket.create_connection(("127.0.0.1", other.peer.port), DEADLINE_S) as one:
            one.sendall(message(0, launch="launch0", **question))
            assert received(one) == b""
    for one in announced:
        assert received(one) == b""
        one.close()
    assert got(other.peer, "s1") == content(1000)
    assert resident(other.pid) - before < 32 << 20


def received(one: socket.socket) -> bytes:
    """All that comes until the other end has closed the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := one.recv(1 << 16):
            found += part
    return found


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_a_process_that_is_stopped_or_gone_is_named_in_time(two: tuple[Host, Host]) -> None:
    one, other = two
    reserve(other, 1000)
    fill(one.slots[0], content(1000), "s1")
    os.kill(other.pid, signal.SIGSTOP)
    began = time.monotonic()
    ((_, (error,), *_)) = send_copies(one.peer, 0, [other.peer], None, 1.0)
    assert error == f"{other.peer} does not answer"
    with pytest.raises(PeerError, match="does not answer"):
        got(other.peer, "s1", deadline_s=1.0)
    assert time.monotonic() - began < DEADLINE_S
    os.kill(other.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    ((_, (error,), *_)) = send_copies(one.peer, 0, [Peer("gone", "127.0.0.1", free_port())], None, 1.0)
    assert "cannot be reached: Connection refused" in error
    assert not other.process.runs()
    other.process.start(lambda: None)  # as the agent does; nobody has reserved anything there since
    assert send_copies(one.peer, 0, [other.peer], None, DEADLINE_S)[1] == []
    assert got(other.peer, "s1") == content(1000)


def let_in(listening: socket.socket) -> socket.socket:
    """The next connection of this launch; it blocks."""
    acceptor = Acceptor([listening], SECRET.encode(), COPIES)
    while not (found := acceptor.accepted()):
        acceptor.wait()
    ((connected, _),) = found
    connected.setblocking(True)
    return connected


def liar(answer: Callable[[socket.socket], object]) -> Peer:
    """A part of this launch that does what `answer` does with each connection, once its question has come."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connected = let_in(listening)
        with listening, connected:
            connected.recv(1 << 20)
            answer(connected)

    threading.Thread(target=serve, daemon=True).start()
    return Peer("liar", *listening.getsockname())


def message(num_bytes: int = 0, **content: Any) -> bytes:
    """A frame up to its payload of so many bytes."""
    text = json.dumps(content).encode()
    return struct.pack("<IQ", len(text), num_bytes) + text


SAVED = content(100_000, 9)
LONGER = record_of(SAVED, "s1") | {"file": record_of(SAVED, "s1")["file"] | {"num_bytes": 100_001}}


RECORD = message(len(SAVED), record=record_of(SAVED, "s1"))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (message(record=LONGER), "says that a file has 100001 bytes, and its extents have 100000"),
        (RECORD + SAVED[:-1], "has ended the connection 1 bytes too early"),
        (message(record=record_of(SAVED, "s2")), "sends another save than s1"),
        (message(record=record_of(SAVED, "s1", dp=1)), "sends another save than s1"),
        (message(record={"save": "s1"}), "without a layout and coordinates"),
        (message(99_999, record=record_of(SAVED, "s1")) + SAVED[:-1], r"sends \d+ bytes more, and \d+ are needed"),
        (struct.pack("<IQ", 1 << 31, 0), "sends a message of 2147483648 bytes"),
        (struct.pack("<IQ", 2, 0) + b"{]", "sends what is no message"),
        (b"", "has ended the connection"),
    ],
)
def test_a_peer_that_lies_is_named(answer: bytes, why: str) -> None:
    with pytest.raises(PeerError, match=rf"^liar \(127.0.0.1:\d+\) .*{why}"):
        got(liar(lambda connected: connected.sendall(answer)), "s1", deadline_s=DEADLINE_S)


def test_a_peer_that_stalls_is_named() -> None:
    over = threading.Event()

    def stall(connected: socket.socket) -> None:
        connected.sendall(RECORD + SAVED[:9])
        over.wait()

    with pytest.raises(PeerError, match=r"^liar \S+ is stalled: it said nothing for 2 s"):
        got(liar(stall), "s1", deadline_s=2.0)
    over.set()


def test_a_peer_that_trickles_is_stalled() -> None:
    """A byte now and then keeps no rank waiting for ever; on a slow machine not even that comes in time."""

    def trickle(connected: socket.socket) -> None:
        connected.sendall(RECORD)
        for at in range(len(SAVED)):
            connected.sendall(SAVED[at : at + 1])
            time.sleep(0.05)

    def answer(connected: socket.socket) -> None:
        try:
            trickle(connected)
        except OSError:
            return  # it was given up

    with pytest.raises(PeerError, match="is stalled: it (sent|said nothing)"):
        got(liar(answer), "s1", deadline_s=2.0)


def test_who_sends_is_told_why_nobody_takes_it() -> None:
    """The taker says what is wrong with the first bytes, and closes: the sender cannot send the rest."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sends, takes = socket.create_connection(listening.getsockname()), listening.accept()[0]
    saved = os.memfd_create("saved")
    os.truncate(saved, 200 << 20)  # more than any buffer holds

    def take() -> None:
        with Channel(takes, DEADLINE_S) as channel:
            channel.hear()
            channel.receive_into(memoryview(bytearray(1 << 20)))
            channel.tell(error="has a damaged copy")

    taking = threading.Thread(target=take)
    taking.start()
    with Channel(sends, DEADLINE_S) as channel, pytest.raises(PeerError, match="^has a damaged copy$"):
        channel.send_file({}, saved, [(0, 200 << 20)])
    taking.join()
    os.close(saved)


def test_a_record_says_whose_save_it_is() -> None:
    assert key_of(record_of(b"x", "s", dp=1)) == (1, 1, 2, 0, 0, 1)


def test_who_tells_waits_no_longer_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that waited for its own process, stopped or busy, would miss its heartbeats."""
    monkeypatch.setenv(SECRET_VARIABLE, "s" * 32)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PeerError, match="does not answer"):
        tell(silent.getsockname()[1], 0.05, ask="expect")
