"""TLS between the parts of a launch, if it is asked for: the three files, and sockets that encrypt.

Mutual TLS 1.3 (RFC 8446): each end has a certificate of the CA that is named, and lets in nobody without one. Names in
certificates are not compared: nodes are reached by addresses, names and virtual addresses, and the CA may have issued
certificates for other jobs. That the other end is of this launch is proved inside the TLS session (handshake.py), by
an HMAC which also covers the server's certificate, as the channel binding `tls-server-end-point` of RFC 5929 does
(here always with SHA-256). So a process with another certificate of the CA cannot stand between two parts.

Paths are in the environment of the launch's processes. Each process reads the files when it begins to listen, and
whenever it connects.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import ssl
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

FLAGS = {
    "--tls-cert-file": "MEGATRON_TLS_CERT_FILE",
    "--tls-key-file": "MEGATRON_TLS_KEY_FILE",
    "--tls-ca-cert-file": "MEGATRON_TLS_CA_CERT_FILE",
}  # and the variables that hand them to the processes of a launch
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_Result = TypeVar("_Result")


class TlsSettingsError(OSError, ValueError):
    """The files cannot be used; the message names the flag, the file, and what helps."""


class TlsSocket(ssl.SSLSocket):
    """As a plain socket to those that use it: BlockingIOError where TLS can neither read nor write now.

    Who reads `RECORD` bytes at once, or to the end of what the other end has sent in one call, leaves nothing behind
    that `poll` would not tell of: OpenSSL takes one record at a time from the kernel.
    """

    RECORD = 1 << 14  # bytes at most of one (RFC 8446, section 5.1)

    def do_handshake(self, block: bool = False) -> None:
        _or_blocking(lambda: super(TlsSocket, self).do_handshake(block))

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        return _or_blocking(lambda: super(TlsSocket, self).read(len, buffer))

    def send(self, data: Any, flags: int = 0) -> int:
        """What is tried again after BlockingIOError has to begin with the same bytes: a record of them is made."""
        return _or_blocking(lambda: super(TlsSocket, self).send(data, flags))

    def shutdown(self, how: int) -> None:
        """As of the connection: that of SSLSocket would have another thread read what is encrypted."""
        socket.socket.shutdown(self, how)


def _or_blocking(call: Callable[[], _Result]) -> _Result:
    try:
        return call()
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
        raise BlockingIOError from error


class Tls:
    """The files of a launch, as they are now."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """`files`: by flag. Raises TlsSettingsError."""
        self.files = files
        certificate = _first_certificate(self._read("--tls-cert-file"))
        self._own = _digest(ssl.PEM_cert_to_DER_cert(certificate))
        self._contexts = {side: self._context(side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)}

    @property
    def server_binding(self) -> bytes:
        """In a server: what its proof and that of the client cover."""
        return self._own

    def accept(self, connected: socket.socket) -> TlsSocket:
        """The server's end; `do_handshake` is to be called, until it does not raise BlockingIOError."""
        return self._wrapped(connected, ssl.PROTOCOL_TLS_SERVER)

    def connect(self, connected: socket.socket) -> TlsSocket:
        """The client's end, after `do_handshake`, which may take as long as the timeout of the socket says.

        Raises OSError; ssl.SSLError if the other end speaks no TLS, or has no certificate of the CA.
        """
        wrapped = self._wrapped(connected, ssl.PROTOCOL_TLS_CLIENT)
        try:
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
        return wrapped

    def check(self) -> None:
        """Raises TlsSettingsError if a process with these files would not let in another one with them."""
        try:
            _meet_in_memory(*self._contexts.values())
        except ssl.SSLError as error:
            self._refuse(
                "--tls-cert-file",
                f"processes of a launch could not connect with it: {reason_of(error)}; give one that is valid now, "
                f"issued by {self.files['--tls-ca-cert-file']}, for clients and for servers (extendedKeyUsage "
                "serverAuth and clientAuth, or none)",
            )

    def _wrapped(self, connected: socket.socket, side: Any) -> TlsSocket:
        found = self._contexts[side].wrap_socket(
            connected, server_side=side == ssl.PROTOCOL_TLS_SERVER, do_handshake_on_connect=False
        )
        assert isinstance(found, TlsSocket)
        return found

    def _context(self, side: Any) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.sslsocket_class = TlsSocket
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # nobody resumes a session; a ticket would wake a client that has nothing to read
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        flags = "--tls-cert-file", "--tls-key-file", "--tls-ca-cert-file"
        certificate, key, authority = (self.files[flag] for flag in flags)
        text = self._read("--tls-key-file")
        if "PRIVATE KEY-----" not in text:
            self._refuse("--tls-key-file", "has no private key in PEM; give one that begins with -----BEGIN")
        mode = stat.S_IMODE(os.stat(key).st_mode)
        if mode & 0o077:
            self._refuse("--tls-key-file", f"others may access it (mode {mode:o}); chmod 600 {key}")
        self._read("--tls-ca-cert-file")
        try:
            context.load_verify_locations(authority)
        except ssl.SSLError:
            self._refuse("--tls-ca-cert-file", "has no certificate in PEM; give that of the CA")
        try:
            context.load_cert_chain(certificate, key, password=self._refuse_passphrase)
        except ssl.SSLError as error:
            why = "is not that of the certificate in" if "MISMATCH" in (error.reason or "") else "cannot be read with"
            self._refuse("--tls-key-file", f"{why} {certificate} ({reason_of(error)}); give the key of that one")

    def _refuse_passphrase(self) -> NoReturn:
        self._refuse("--tls-key-file", "needs a passphrase, and nobody is there to type it; give a key without one")

    def _read(self, flag: str) -> str:
        try:
            text = Path(self.files[flag]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            self._refuse(flag, f"{getattr(error, 'strerror', None) or 'is no text'}; give a file in PEM")
        if flag == "--tls-cert-file" and not _CERTIFICATE.search(text):
            self._refuse(flag, "has no certificate in PEM; give one that begins with -----BEGIN CERTIFICATE-----")
        return text

    def _refuse(self, flag: str, why: str) -> NoReturn:
        raise TlsSettingsError(f"{flag} {self.files[flag]}: {why}")


def peer_binding(connected: TlsSocket) -> bytes:
    """In a client: what the proofs cover, by the certificate that the server has shown."""
    shown = connected.getpeercert(binary_form=True)
    assert shown is not None, "CERT_REQUIRED"
    return _digest(shown)


def is_encrypted(connected: socket.socket) -> bool:
    """Whether it is a connection with TLS: then what the kernel would send by itself is not to be sent so."""
    return isinstance(connected, TlsSocket)


def take_files(given: Mapping[str, Path | None]) -> None:
    """Have this process and those that it starts use TLS with the files that are given, by flag, or by the variables.

    Raises TlsSettingsError if they cannot be used.
    """
    files = _files_of_launch() | {flag: str(path) for flag, path in given.items() if path is not None}
    tls = _tls_with({flag: os.path.abspath(path) if path else "" for flag, path in files.items()})
    if tls is not None:
        tls.check()
        os.environ.update({FLAGS[flag]: path for flag, path in tls.files.items()})


def tls_of_launch() -> Tls | None:
    """None if this launch uses no TLS. Raises TlsSettingsError."""
    return _tls_with(_files_of_launch())


def _files_of_launch() -> dict[str, str]:
    """By flag; empty for what is not set."""
    return {flag: os.environ.get(variable, "") for flag, variable in FLAGS.items()}


def _tls_with(files: Mapping[str, str]) -> Tls | None:
    missing = [flag for flag, path in files.items() if not path]
    if len(missing) == len(files):
        return None
    if missing:
        names = ", ".join(f"{flag} ({FLAGS[flag]})" for flag in missing)
        there = next(f"{flag} {path}" for flag, path in files.items() if path)
        raise TlsSettingsError(f"{there}: TLS needs three files; give {names}, too")
    return Tls(files)


def reason_of(error: ssl.SSLError) -> str:
    """In OpenSSL's words, without the line of its source."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message}"
    return (error.reason or error.strerror or str(error)).replace("_", " ").lower()


def _first_certificate(text: str) -> str:
    found = _CERTIFICATE.search(text)
    assert found is not None
    return found[0]


def _digest(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def _meet_in_memory(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """One handshake between them. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(3):  # more flights than TLS 1.3 has
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
