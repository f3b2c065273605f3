"""How two processes of a launch prove to each other, when they connect, that they know its secret.

    client                                          server
    MAGIC and the client's nonce            ->
                                            <-      the server's nonce, HMAC("server", nonces)
    claim, HMAC("client", nonces, claim)    ->

The three-pass mutual authentication of ISO/IEC 9798-4 with HMAC-SHA-256 (RFC 2104): the secret itself is not sent, and
since each side chooses a nonce, what was recorded proves nothing later. The client has waited for one round trip when
it may send. All parts have a fixed length, so that nothing of a stranger's is allocated. Each HMAC also covers the
`purpose` of the port, which makes its answer useless at a port of another purpose.

Only the beginning of the connection is authenticated: who can change packets on the way can take it over
(docs/security.md). Where the launch uses TLS (tls.py), all of this is said inside the TLS session, which protects the
rest, and each HMAC also covers the server's certificate.
"""

from __future__ import annotations

import hmac
import os
import socket
import ssl
import time

from megatron.net.tls import FLAGS, Tls, TlsSocket, peer_binding, reason_of, tls_of_launch

MAGIC = b"restart1"
_NONCE = 32  # bytes
_DIGEST = 32
CLAIM = 16  # bytes that the client adds, and the server learns of: who the client is
COORDINATOR, COPIES, AGREEMENT, MEETING = b"coordinator", b"copies", b"agreement", b"meeting"  # purposes


class AuthenticationError(OSError):
    """What answers is no part of this launch."""

    def __init__(self) -> None:
        super().__init__(
            "what listens there does not know the secret of this launch: it belongs to something else, or was given "
            "another MEGATRON_LAUNCH_SECRET"
        )


class NoAnswerError(TimeoutError):
    """Something has accepted the connection and has not answered in time: the address is right, or a stranger's."""

    def __init__(self) -> None:
        super().__init__("the connection was accepted, but not answered in time")


class TlsError(AuthenticationError):
    """What answers speaks no TLS, or the ends do not accept each other's certificates."""

    def __init__(self, error: OSError) -> None:
        why = reason_of(error) if isinstance(error, ssl.SSLError) else error.strerror or error
        OSError.__init__(
            self,
            f"TLS with what listens there failed ({why}): give all parts of the launch {', '.join(FLAGS)}, with "
            "certificates of the same CA that are valid now",
        )


def _proof(secret: bytes, role: bytes, purpose: bytes, nonces: bytes, claim: bytes = b"") -> bytes:
    """`nonces`: and what binds the proof to the TLS session, if there is one."""
    return hmac.digest(secret, b"\0".join((MAGIC, role, purpose)) + b"\0" + nonces + claim, "sha256")


class ServerSide:
    """The server's part of one handshake, over a connection that never blocks. `began`: monotonic, s."""

    def __init__(self, connected: socket.socket, secret: bytes, purpose: bytes, tls: Tls | None = None) -> None:
        """`connected` belongs to it from then on, and with TLS is replaced. Raises OSError if that has ended."""
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connected = connected if tls is None else tls.accept(connected)
        self._binding = b"" if tls is None else tls.server_binding
        self._is_open = tls is None  # whether the TLS session, if any, is
        self.began = time.monotonic()
        self.claim = b""  # of a client that has proved that it knows the secret
        self._secret, self._purpose = secret, purpose
        self._nonces = b""  # the client's and ours, once the client has told its
        self._said = b""
        self._awaited = len(MAGIC) + _NONCE

    @property
    def has_begun(self) -> bool:
        """Whether the client has said what one of this program says first; with TLS, which takes longer, at once."""
        return bool(self._nonces or self._binding)

    def go_on(self) -> bool | None:
        """Read what has come; True when the client is authenticated, False if it never will be, None until then."""
        while True:
            try:
                if not self._is_open:
                    assert isinstance(self.connected, TlsSocket)
                    self.connected.do_handshake()
                    self._is_open = True
                part = self.connected.recv(self._awaited - len(self._said))
                if not part:
                    return False
                self._said += part
                if len(self._said) < self._awaited:
                    continue
                if self._nonces:
                    return self._is_proved()
                if not self._answer():
                    return False
            except BlockingIOError:
                return None
            except OSError:
                return False

    def _answer(self) -> bool:
        magic, nonce = self._said[: len(MAGIC)], self._said[len(MAGIC) :]
        if magic != MAGIC:
            return False
        mine = os.urandom(_NONCE)
        self._nonces = self._binding + nonce + mine
        self._said, self._awaited = b"", CLAIM + _DIGEST
        answer = mine + _proof(self._secret, b"server", self._purpose, self._nonces)
        return self.connected.send(answer) == len(answer)  # nothing else has been sent: it fits

    def _is_proved(self) -> bool:
        self.claim, proof = self._said[:CLAIM], self._said[CLAIM:]
        return hmac.compare_digest(proof, _proof(self._secret, b"client", self._purpose, self._nonces, self.claim))


def connect(
    address: tuple[str, int],
    secret: bytes,
    purpose: bytes,
    timeout_s: float,
    claim: bytes = b"",
    answer_s: float | None = None,
) -> socket.socket:
    """A connection to a part of the launch, which blocks. `claim`: at most CLAIM bytes.

    `timeout_s`: for the connection, and again for the answer unless `answer_s` says otherwise. Raises OSError;
    AuthenticationError if what answers does not know the secret, NoAnswerError if nothing answers there, TlsError if
    one end alone uses TLS or the ends have certificates of different CAs, TlsSettingsError if the files for TLS cannot
    be used.
    """
    tls = tls_of_launch()
    connected = socket.create_connection(address, timeout_s)
    deadline = time.monotonic() + (timeout_s if answer_s is None else answer_s)
    try:
        binding = b""
        if tls is not None:
            connected.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connected = tls.connect(connected)
            except TimeoutError:
                raise NoAnswerError from None
            binding = peer_binding(connected)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce, claim = os.urandom(_NONCE), claim.ljust(CLAIM, b"\0")
        connected.sendall(MAGIC + nonce)
        answer = _receive(connected, _NONCE + _DIGEST, deadline)
        nonces, proof = binding + nonce + answer[:_NONCE], answer[_NONCE:]
        if not hmac.compare_digest(proof, _proof(secret, b"server", purpose, nonces)):
            raise AuthenticationError
        connected.sendall(claim + _proof(secret, b"client", purpose, nonces, claim))
        connected.settimeout(None)
    except (ssl.SSLError, ConnectionError) as error:
        connected.close()
        if tls is not None:
            raise TlsError(error) from error
        raise ConnectionResetError(
            "the connection was closed before the other side proved to be of this launch; does it alone use TLS?"
        ) from error
    except BaseException:
        connected.close()
        raise
    return connected


def _receive(connected: socket.socket, size: int, deadline: float) -> bytes:
    said = b""
    while len(said) < size:
        connected.settimeout(max(0.001, deadline - time.monotonic()))  # what has come is taken, however late that is
        try:
            part = connected.recv(size - len(said))
        except TimeoutError:
            raise NoAnswerError from None
        if not part:
            raise ConnectionResetError("closed")
        said += part
    return said
