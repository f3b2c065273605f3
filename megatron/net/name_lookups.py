"""Keeps a process from asking a name server, for as long as it needs none.

torch's TCPStore asks for the host name of every peer, for its log: a client for that of the server, before it connects,
and the server for that of each client, in the thread that serves all of them. The peer of an IPv4 connection is given
as ::ffff:127.0.0.1, say, which no /etc/hosts lists, so each of these is a query to a name server; if that does not
answer, 10 s are lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import socket
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_NSSWITCH = "/etc/nsswitch.conf"
_DEFAULT = "files dns"  # glibc's, where the file names no source of host names


@contextlib.contextmanager
def names_from_files() -> Iterator[None]:
    """A context in which no thread of this process gets host names from elsewhere than /etc/hosts.

    An address that is not in there is its own name then, at once and without an error. By glibc's
    __nss_configure_lookup (nss.h); another C library has none, and asks as ever.
    """
    if not use_names_from_files():
        yield
        return
    try:
        yield
    finally:
        _configure(_sources())


def use_names_from_files() -> bool:
    """As `names_from_files`, for the rest of this process; False if the C library cannot."""
    return _configure("files")


def numeric_address(host: str) -> str | None:
    """The address of `host`: its only IPv4 one, or else its only IPv6 one. None if there are several, or none is known.

    With several it takes a connection to find the right one.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family in (socket.AF_INET, socket.AF_INET6):
        addresses = {str(address[0]) for kind, _, _, _, address in found if kind == family}
        if addresses:
            return addresses.pop() if len(addresses) == 1 else None
    return None


def _configure(sources: str) -> bool:
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    return configure is not None and configure(b"hosts", sources.encode()) == 0


def _sources() -> str:
    """Where this host is configured to get host names from."""
    try:
        with open(_NSSWITCH) as file:
            lines = [line.partition("#")[0] for line in file]
    except OSError:
        return _DEFAULT
    found = [line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == "hosts"]
    return found[-1] if found and found[-1] else _DEFAULT
