"""Who is let in at a port of a launch: those who know its secret, however many strangers are there. Over loopback."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from megatron.net import acceptor
from megatron.net.acceptor import Acceptor
from megatron.net.handshake import CLAIM, COORDINATOR, COPIES, MAGIC, AuthenticationError, connect
from tests.descriptors import open_descriptors

SECRET = b"s" * 32
WAIT_S = 120.0


class Port:
    """A port at which a thread lets in whoever knows the secret, and answers it with its claim."""

    def __init__(self, secret: bytes = SECRET) -> None:
        listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.address: tuple[str, int] = listening.getsockname()
        self.acceptor = Acceptor([listening], secret, COPIES)
        self.let_in = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            self.acceptor.wait(0.05)
            for connected, claim in self.acceptor.accepted():
                self.let_in += 1
                with connected:
                    connected.setblocking(True)
                    connected.sendall(claim + connected.recv(100))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.acceptor.close()


@pytest.fixture
def port() -> Iterator[Port]:
    with closing(Port()) as made:
        yield made


def known(address: tuple[str, int], secret: bytes = SECRET, purpose: bytes = COPIES, say: bytes = b"hello") -> bytes:
    """What a client hears that sends with its claim what it has to say."""
    with connect(address, secret, purpose, WAIT_S, b"me") as client:
        client.sendall(say)
        return client.recv(100)


def stranger(port: Port, said: bytes = b"") -> socket.socket:
    made = socket.create_connection(port.address, WAIT_S)
    made.sendall(said)
    return made


def hung_up_on(port: Port, said: bytes) -> bool:
    """By an end, or since the port has closed the connection with something unread."""
    with stranger(port, said) as one:
        try:
            while one.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True


def test_who_knows_the_secret_is_let_in_with_its_claim(port: Port) -> None:
    assert known(port.address) == b"me".ljust(CLAIM, b"\0") + b"hello"
    with pytest.raises(AuthenticationError, match="does not know the secret of this launch"):
        known(port.address, secret=b"t" * 32)
    with pytest.raises(AuthenticationError):
        known(port.address, purpose=COORDINATOR)
    assert port.let_in == 1


def test_strangers_are_hung_up_on_and_heard_no_further(port: Port) -> None:
    generator = random.Random(5)
    for said in (
        b"GET / HTTP/1.0\r\nHost: somewhere\r\n\r\n".ljust(40),
        b"\xff\xff\xff\xff" + bytes(36),  # a length of 4 GiB, if that were one
        MAGIC + bytes(32) + bytes(48),  # a proof that is none
        *(generator.randbytes(generator.randrange(40, 5000)) for _ in range(50)),
        *(MAGIC + generator.randbytes(generator.randrange(80, 5000)) for _ in range(50)),
    ):
        assert hung_up_on(port, said)
    assert port.let_in == 0 and known(port.address)


@contextmanager
def recorder(port: Port) -> Iterator[tuple[tuple[str, int], bytearray]]:
    """An address that passes one connection on, and what the client has said there."""
    said = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pass_on() -> None:
            client, _ = listening.accept()
            with client, stranger(port) as server:
                for size, source, target in ((40, client, server), (64, server, client), (53, client, server)):
                    part = b""
                    while len(part) < size:
                        part += source.recv(size - len(part))
                    target.sendall(part)
                    if source is client:
                        said.extend(part)
                client.sendall(server.recv(100))

        thread = threading.Thread(target=pass_on)
        thread.start()
        yield listening.getsockname(), said
        thread.join()


def test_what_was_recorded_proves_nothing_later(port: Port) -> None:
    with recorder(port) as (address, said), connect(address, SECRET, COPIES, WAIT_S) as client:
        client.sendall(b"hello")
        assert client.recv(100).endswith(b"hello")
    assert len(said) == 93 and port.let_in == 1
    assert hung_up_on(port, bytes(said)) and port.let_in == 1


def test_the_servers_own_proof_is_no_clients(port: Port) -> None:
    with stranger(port, MAGIC + bytes(32)) as one:
        answer = b""
        while len(answer) < 64:
            answer += one.recv(64)
        one.sendall(bytes(CLAIM) + answer[32:])
        assert one.recv(1) == b""
    assert port.let_in == 0


def test_strangers_that_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there is room for: the oldest give way. They cost a bounded number of descriptors."""
    monkeypatch.setattr(acceptor, "MOST", 8)
    monkeypatch.setattr(acceptor, "SURE_S", WAIT_S)
    with closing(Port()) as port:
        before = open_descriptors()
        strangers = [stranger(port, MAGIC[: number % 8]) for number in range(40)]
        assert known(port.address)
        assert len(open_descriptors() - before) <= len(strangers) + 8 + 1
        for one in strangers:
            one.close()


def test_strangers_that_begin_the_handshake_give_way_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "MOST", 8)
    monkeypatch.setattr(acceptor, "SILENT_S", WAIT_S)
    monkeypatch.setattr(acceptor, "SURE_S", 0.05)
    with closing(Port()) as port:
        strangers = [stranger(port, MAGIC + bytes(32)) for _ in range(20)]
        assert known(port.address)
        for one in strangers:
            one.close()


def test_one_that_says_little_by_little_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "PATIENCE_S", 0.2)
    with closing(Port()) as port, stranger(port) as one:
        one.settimeout(0.01)
        until = time.monotonic() + WAIT_S
        with pytest.raises(ConnectionError):
            while time.monotonic() < until:
                one.sendall(b"r")
                try:
                    if one.recv(1) == b"":
                        raise ConnectionResetError
                except TimeoutError:
                    continue


def test_no_memory_is_taken_for_what_a_stranger_announces(port: Port) -> None:
    """Strangers that send without an end are read no further than a handshake goes."""
    before = _resident()
    for _ in range(20):
        with stranger(port) as one:
            try:
                for _ in range(64):
                    one.sendall(bytes(1 << 16))
            except (ConnectionError, TimeoutError):
                continue
    assert _resident() - before < 32 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("answer", [b"HTTP/1.0 400 Bad Request\r\n".ljust(64), bytes(64), b"Z" * 200])
def test_a_client_goes_on_with_nobody_else(answer: bytes) -> None:
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connected, _ = listening.accept()
            with connected:
                connected.recv(40)
                connected.sendall(answer)
                with contextlib.suppress(ConnectionResetError):
                    while part := connected.recv(1000):
                        heard.extend(part)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(AuthenticationError):
            connect(listening.getsockname(), SECRET, COPIES, WAIT_S)
        thread.join()
    assert not heard, "nothing that only the launch may know"


def test_a_client_waits_no_longer_than_it_was_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(TimeoutError):
        connect(listening.getsockname(), SECRET, COPIES, WAIT_S, answer_s=0.05)
