"""Connections of a launch with TLS: who is let in, what is on the wire, which files are refused. Over loopback."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from megatron.launch.cli import parse_arguments, parse_coordinator_arguments
from megatron.net import acceptor, handshake
from megatron.net.handshake import COPIES, MAGIC, AuthenticationError, NoAnswerError, TlsError, connect
from megatron.net.tls import FLAGS, TlsSocket, tls_of_launch
from tests.unit.certificates import Files, issue, make_files
from tests.unit.megatron.net.test_acceptor import SECRET, WAIT_S, Port, _resident, hung_up_on, known, stranger

MARKER = b"weights of layer 1 "
LONG_HELLO = b"\x16\x03\x01\x40\x00"  # the beginning of one of 16 KiB, the rest of which never comes
MUCH = 64 << 20  # bytes: more than all that wait may cost


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("tls") / "a")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of another CA."""
    return make_files(tmp_path_factory.mktemp("tls") / "b")


def with_files(monkeypatch: pytest.MonkeyPatch, files: Files | None) -> None:
    """Connections of this process from now on; None: without TLS."""
    for variable in FLAGS.values():
        monkeypatch.delenv(variable, raising=False)
    for variable, path in (files.variables if files else {}).items():
        monkeypatch.setenv(variable, path)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch, files: Files) -> Iterator[Port]:
    with_files(monkeypatch, files)
    with closing(Port()) as made:
        yield made


def test_who_has_no_certificate_of_the_ca_is_turned_away(
    port: Port, monkeypatch: pytest.MonkeyPatch, files: Files, others: Files
) -> None:
    assert known(port.address).endswith(b"hello") and port.let_in == 1
    with pytest.raises(AuthenticationError, match="does not know the secret of this launch"):
        known(port.address, secret=b"t" * 32)
    with_files(monkeypatch, others)  # it shows its certificate to nobody, for the server's is of another CA
    with pytest.raises(TlsError, match=r"TLS with what listens there failed .*certificates of the same CA"):
        known(port.address)
    with_files(monkeypatch, Files(others.certificate, others.key, files.authority))
    with pytest.raises(TlsError):
        known(port.address)
    with_files(monkeypatch, None)
    with pytest.raises(ConnectionResetError, match="does it alone use TLS"):
        known(port.address)
    assert port.let_in == 1


def test_a_client_with_tls_goes_on_with_no_plain_server(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    with_files(monkeypatch, None)
    with closing(Port()) as plain:
        with_files(monkeypatch, files)
        with pytest.raises(TlsError):
            known(plain.address)
        assert plain.let_in == 0


def test_who_does_not_answer_is_told_from_who_refuses(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    with_files(monkeypatch, files)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(NoAnswerError):
        connect(silent.getsockname(), SECRET, COPIES, WAIT_S, answer_s=0.05)


def test_an_answer_is_read_that_came_while_the_client_stood_still() -> None:
    client, server = socket.socketpair()
    with client, server:
        server.sendall(b"answer")
        assert handshake._receive(client, 6, time.monotonic() - 1) == b"answer"


@contextmanager
def passing_on(
    port: Port, client_side: ssl.SSLContext | None, server_side: ssl.SSLContext | None
) -> Iterator[tuple[tuple[str, int], bytearray]]:
    """An address that passes one connection on to the port, and all bytes that it has passed on.

    With contexts it ends TLS on both sides: `client_side` towards the client, `server_side` towards the port.
    """
    passed = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pass_on() -> None:
            client, _ = listening.accept()
            with contextlib.suppress(OSError), client, stranger(port) as server:
                ends: list[socket.socket] = [client, server]
                if client_side is not None and server_side is not None:
                    ends = [client_side.wrap_socket(client, server_side=True), server_side.wrap_socket(server)]
                while True:
                    for one in select.select(ends, [], [], WAIT_S)[0]:
                        part = one.recv(1 << 16)
                        passed.extend(part)
                        ends[one is ends[0]].sendall(part)
                        if not part:
                            return

        thread = threading.Thread(target=pass_on)
        thread.start()
        yield listening.getsockname(), passed
        thread.join()


def test_the_wire_shows_nothing_of_what_is_said(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    with passing_on(port, None, None) as (address, passed):
        assert known(address, say=MARKER).endswith(MARKER)
    assert passed and MARKER not in passed and MAGIC not in passed
    with_files(monkeypatch, None)
    with closing(Port()) as plain, passing_on(plain, None, None) as (address, passed):
        assert known(address, say=MARKER).endswith(MARKER)
    assert MARKER in passed and MAGIC in passed, "without TLS it does, so the test would see it"


def test_nobody_stands_between_with_another_certificate_of_the_ca(port: Port, files: Files, tmp_path: Path) -> None:
    """It ends TLS on both sides, and passes on what it reads: the proofs are for another certificate."""
    own = issue(files, tmp_path / "between")
    sides = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.load_verify_locations(own.authority)
        context.load_cert_chain(own.certificate, own.key)
        sides.append(context)
    with passing_on(port, *sides) as (address, passed):
        with pytest.raises(AuthenticationError, match="does not know the secret of this launch"):
            known(address, say=MARKER)
        assert MAGIC in passed, "it has read what both sides said"
    assert port.let_in == 0


@pytest.mark.slow
def test_strangers_cost_little_before_they_are_let_in(
    port: Port, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there is room for, each with a session of TLS, a half of one, or none; then one that belongs here."""
    monkeypatch.setattr(acceptor, "SURE_S", 0.05)
    tls = tls_of_launch()
    assert tls is not None
    known(port.address)
    before = _resident()
    waiting: list[socket.socket] = []
    for number in range(acceptor.MOST):
        one = stranger(
            port, b"\x16\x03\x01\x40\x00" if number % 4 == 1 else b""
        )  # a hello of 16 KiB, which never comes
        waiting.append(tls.connect(one) if number % 4 > 1 else one)
    assert known(port.address).endswith(b"hello")
    assert _resident() - before < MUCH
    for one in waiting:
        one.close()
    assert hung_up_on(port, b"GET / HTTP/1.0\r\nHost: somewhere\r\n\r\n".ljust(40))
    assert hung_up_on(port, MAGIC + bytes(72))


@contextmanager
def session(monkeypatch: pytest.MonkeyPatch, files: Files) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """The client's end and the server's."""
    with_files(monkeypatch, files)
    tls = tls_of_launch()
    assert tls is not None
    with socket.create_server(("127.0.0.1", 0)) as listening:
        plain = socket.create_connection(listening.getsockname(), WAIT_S)
        accepted = tls.accept(listening.accept()[0])
        thread = threading.Thread(target=accepted.do_handshake)
        thread.start()
        with tls.connect(plain) as client, accepted:
            thread.join()
            yield client, accepted


def test_what_waits_in_the_session_is_not_forgotten(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    """poll(2) knows of the kernel's buffer alone: after a read of RECORD bytes nothing else may have any."""
    with session(monkeypatch, files) as (client, accepted):
        client.sendall(bytes(TlsSocket.RECORD) + b"ab")
        client.sendall(b"c")
        accepted.setblocking(False)
        came = 0
        while came < TlsSocket.RECORD + 3:
            assert select.select([accepted], [], [], WAIT_S)[0]
            with contextlib.suppress(BlockingIOError):
                came += len(accepted.recv(TlsSocket.RECORD))
            assert accepted.pending() == 0
        with pytest.raises(BlockingIOError):
            accepted.recv(1)


def test_no_reader_sees_what_is_encrypted_after_a_shutdown(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    with session(monkeypatch, files) as (client, accepted):
        client.sendall(b"said")
        assert select.select([accepted], [], [], WAIT_S)[0]
        accepted.shutdown(socket.SHUT_RDWR)
        assert accepted.recv(100) in (b"said", b"") and accepted.recv(100) == b""


def test_a_client_hears_nothing_that_nobody_said(monkeypatch: pytest.MonkeyPatch, files: Files) -> None:
    """No ticket for a later session: it would wake whoever waits for a message."""
    with session(monkeypatch, files) as (client, _):
        assert not select.select([client], [], [], 0)[0]


WRONG = {
    "one_is_missing": r"--tls-cert-file \S+: TLS needs three files; give --tls-ca-cert-file \(\w+_CA_CERT_FILE\), too",
    "no_certificate": r"--tls-cert-file \S+/none: No such file or directory; give a file in PEM",
    "no_key": r"--tls-key-file \S+/none: No such file or directory; give a file in PEM",
    "no_ca": r"--tls-ca-cert-file \S+/none: No such file or directory; give a file in PEM",
    "open_key": r"--tls-key-file (\S+/open.key): others may access it \(mode 640\); chmod 600 \1",
    "certificate_as_key": r"--tls-key-file \S+/node.pem: has no private key in PEM",
    "key_as_certificate": r"--tls-cert-file \S+/node.key: has no certificate in PEM",
    "key_as_ca": r"--tls-ca-cert-file \S+/node.key: has no certificate in PEM; give that of the CA",
    "key_of_another": r"--tls-key-file \S+/node.key: is not that of the certificate in \S+/node.pem .*; give the key",
    "with_passphrase": r"--tls-key-file \S+/node.key: needs a passphrase, and nobody is there to type it",
    "other_ca": r"--tls-cert-file \S+/node.pem: processes of a launch .*: .*issued by \S+/ca.pem",
    "expired": r"--tls-cert-file \S+/node.pem: processes of a launch .* certificate has expired; give one that",
    "for_servers": r"--tls-cert-file \S+/node.pem: processes of a launch .*unsuitable certificate purpose; give one",
}  # fmt: skip


def wrong_files(case: str, good: Files, others: Files, directory: Path) -> Files:
    none = directory / "none"
    if case == "open_key":
        opened = directory / "open.key"
        opened.write_text(good.key.read_text())
        opened.chmod(0o640)
        return good._replace(key=opened)
    if case == "with_passphrase":
        return make_files(directory / "made", passphrase="x" * 8)
    if case == "expired":
        return make_files(directory / "made", days=-1)
    if case == "for_servers":
        return make_files(directory / "made", usage="serverAuth")
    return {
        "no_certificate": good._replace(certificate=none),
        "no_key": good._replace(key=none),
        "no_ca": good._replace(authority=none),
        "certificate_as_key": good._replace(key=others.certificate),
        "key_as_certificate": good._replace(certificate=good.key),
        "key_as_ca": good._replace(authority=good.key),
        "key_of_another": good._replace(key=others.key),
        "other_ca": good._replace(authority=others.authority),
    }.get(case, good)


@pytest.mark.parametrize("case", WRONG)
def test_files_that_cannot_be_used_are_refused_before_anything_starts(
    case: str,
    files: Files,
    others: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = wrong_files(case, files, others, tmp_path).flags
    flags = flags[:4] if case == "one_is_missing" else flags
    (tmp_path / "script.py").write_text("")
    for parse, words in ((parse_arguments, []), (parse_coordinator_arguments, ["--nnodes", "1"])):
        with_files(monkeypatch, None)
        with pytest.raises(SystemExit) as stopped:
            parse([*words, *flags, str(tmp_path / "script.py")])
        assert stopped.value.code == 2
        said = " ".join(capsys.readouterr().err.split())
        assert re.search(WRONG[case], said), said
