"""Frames: what arrives of them, what ends a connection, and calls that wait. Over loopback, without TLS and with it."""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.net.acceptor import Acceptor
from megatron.net.connection import Connection, Frame, PeerError
from megatron.net.handshake import COPIES, connect
from tests.unit.certificates import make_files
from tests.unit.stalls import jump_after

SECRET = b"s" * 32
AT_MOST_S = 120.0
LONGEST, LONGEST_PAYLOAD = 1 << 20, 64 << 20


class Ends(NamedTuple):
    client: socket.socket
    server: socket.socket


@pytest.fixture(params=["plain", "tls"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ends]:
    if request.param == "tls":
        for variable, path in make_files(tmp_path / "tls").variables.items():
            monkeypatch.setenv(variable, path)
    with socket.create_server(("127.0.0.1", 0)) as listening, closing(Acceptor([listening], SECRET, COPIES)) as port:
        found: list[socket.socket] = []

        def let_in() -> None:
            while not found:
                port.wait()
                found.extend(connected for connected, _ in port.accepted())

        thread = threading.Thread(target=let_in)
        thread.start()
        client = connect(listening.getsockname(), SECRET, COPIES, AT_MOST_S)
        thread.join()
    with client, found[0]:
        yield Ends(client, found[0])


def opened(one: socket.socket, deadline_s: float = AT_MOST_S) -> Connection:
    return Connection(one, LONGEST, longest_payload=LONGEST_PAYLOAD, deadline_s=deadline_s)


def received(connection: Connection, number: int) -> list[Frame]:
    """So many frames, or fewer if it ends before."""
    found = connection.receive()
    while len(found) < number and connection.ended is None:
        assert select.select([connection], [], [], AT_MOST_S)[0]
        found += connection.receive()
    return found


def test_frames_arrive_whole_and_in_order(ends: Ends) -> None:
    client, server = map(opened, ends)
    frames = [
        Frame({"n": 0}, b""),
        Frame({"n": 1, "text": "é" * 5000}, b"payload"),
        Frame({}, secrets.token_bytes(5_000_000)),
    ]
    for content, payload in frames:
        client.put(content, payload)
    assert client.unsent, "more than the kernel's buffers hold"
    sender = threading.Thread(target=client.drain)
    sender.start()
    assert received(server, len(frames)) == frames
    sender.join()
    server.put({"n": 3})
    assert client.next_object() == {"n": 3}
    client.close()
    assert received(server, 1) == [] and server.ended == "has ended"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (struct.pack("<IQ", LONGEST + 1, 0), f"sends a message of {LONGEST + 1} bytes"),
        (struct.pack("<IQ", 2, LONGEST_PAYLOAD + 1), f"sends a message of {LONGEST_PAYLOAD + 3} bytes"),
        (struct.pack("<IQ", 2, 0) + b"[]", "sends what is no message"),
        (struct.pack("<IQ", 2, 0) + b"\xff\xff", "sends what is no message"),
        (struct.pack("<IQ", 200_000, 0) + b"[" * 200_000, "sends what is no message"),
        (struct.pack("<IQ", 0, 0), "sends what is no message"),
    ],
)
def test_what_is_no_frame_ends_the_connection(ends: Ends, said: bytes, why: str) -> None:
    server = opened(ends.server)
    ends.client.sendall(struct.pack("<IQ", 2, 0) + b"{}" + said + struct.pack("<IQ", 2, 0) + b"{}")
    assert received(server, 3) == [Frame({}, b"")] and server.ended == why
    assert server.receive() == []


def test_what_is_no_frame_is_told_to_who_waits(ends: Ends) -> None:
    ends.client.sendall(struct.pack("<IQ", 2, 5) + b"{}12345" + struct.pack("<IQ", 1 << 31, 0))
    server = opened(ends.server)
    assert server.next_object() == {}
    with pytest.raises(PeerError, match="^sends 5 bytes that nobody has asked for$"):
        server.next_object()
    payload = bytearray(6)
    with pytest.raises(PeerError, match="^sends 5 bytes more, and 6 are needed$"):
        server.receive_into(memoryview(payload))
    server.receive_into(memoryview(payload)[:5])
    assert payload == b"12345\0"
    with pytest.raises(PeerError, match="^sends a message of 2147483648 bytes$"):
        server.next_object()


def test_parts_of_a_file_are_one_payload(ends: Ends) -> None:
    client, server = map(opened, ends)
    saved = secrets.token_bytes(5_000_000)
    asked: list[int] = []

    def before(count: int) -> int:
        asked.append(count)
        return min(count, 2_500_000)

    fd = os.memfd_create("saved")
    with open(fd, "wb+") as file:
        file.write(saved)
        file.flush()
        parts = [(10, 4_000_000), (0, 5), (4_999_999, 5_000_000)]
        sender = threading.Thread(target=client.send_file, args=({"kind": "file"}, fd, parts, before))
        sender.start()
        assert server.next_object() == {"kind": "file"}
        taken = bytearray(sum(stop - start for start, stop in parts))
        server.receive_into(memoryview(taken))
        sender.join()
        with pytest.raises(PeerError, match="^was to get more bytes than there are$"):
            client.send_file({}, fd, [(len(saved) - 5, len(saved) + 1)])
    assert taken == b"".join(saved[start:stop] for start, stop in parts)
    assert asked == [3_999_990, 1_499_990, 5, 1]


def test_who_is_silent_is_stalled(ends: Ends) -> None:
    client = opened(ends.client, deadline_s=0.05)
    with pytest.raises(PeerError, match=r"^is stalled: it said nothing for 0\.05 s$"):
        client.next_object()
    with pytest.raises(PeerError, match=r"^is stalled: it took nothing for 0\.05 s$"):
        client.put({}, bytes(LONGEST_PAYLOAD))
        client.drain()


def test_what_has_come_is_taken_though_this_end_stood_still(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = opened(ends.server), opened(ends.client)
    server.put({"said": "in time"})
    assert select.select([ends.client], [], [], AT_MOST_S)[0]
    jump_after(monkeypatch, 1)  # when the deadline is set
    assert client.next_object() == {"said": "in time"}


def test_another_thread_ends_what_is_waited_for(ends: Ends) -> None:
    client = opened(ends.client)
    told: list[str] = []

    def wait() -> None:
        try:
            client.next_object()
        except PeerError as error:
            told.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)  # it most likely waits by then; if not, it fails all the same
    client.abort()
    thread.join(AT_MOST_S)
    assert told and "ended" in told[0]


def test_who_reads_nothing_counts_as_gone(ends: Ends) -> None:
    client = Connection(ends.client, LONGEST, most_unsent=1000)
    while client.ended is None:
        client.put({"text": "x" * 10_000})
    assert client.ended == "reads nothing"


def test_what_was_said_is_received_when_nothing_can_be_sent(ends: Ends) -> None:
    """The other end says its last word, and closes with what it was sent unread: the kernel resets the connection."""
    client, server = map(opened, ends)
    client.put({"beat": 1})
    assert select.select([ends.server], [], [], AT_MOST_S)[0]
    server.put({"exit": 0})
    ends.server.shutdown(socket.SHUT_RDWR)
    server.close()
    while client.ended is None:
        client.put({"beat": 2})
    assert client.receive() == [Frame({"exit": 0}, b"")]


def test_a_frame_that_the_other_end_would_refuse_is_not_sent(ends: Ends) -> None:
    client = opened(ends.client)
    with pytest.raises(ValueError, match="longer than 1048576"):
        client.put({"text": "x" * LONGEST})
    with pytest.raises(ValueError, match="longer than 67108864"):
        client.put({}, bytes(LONGEST_PAYLOAD + 1))
    assert not client.unsent


def test_a_last_word_follows_no_part_of_another_frame(ends: Ends) -> None:
    """The kernel took nothing of a frame; with TLS, a record of its beginning waits to be sent."""
    client, server = map(opened, ends)
    ends.client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least
    number = 0
    while not client.unsent:
        number += 1
        client.put({"n": number}, b"0123456789")
    for more in range(1, 4):
        client.put({"n": number + more}, b"0123456789")
    assert select.select([], [client], [], AT_MOST_S)[1], "now there is room"
    client.put_last({"why": "the disk is gone " * 300})
    client.close()
    found = received(server, number + 5)
    numbers = [content["n"] for content, payload in found if payload == b"0123456789"]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) in (number - 1, number)
    assert [content for content, payload in found if payload == b""] in ([], [{"why": "the disk is gone " * 300}])
