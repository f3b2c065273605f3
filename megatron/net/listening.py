"""Where a port of a launch listens."""

from __future__ import annotations

import socket

_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096  # the kernel caps it (net.core.somaxconn)


def listen_on(address: str, port: int) -> socket.socket:
    """A socket for connections to `address`; only one on 127.0.0.1 is closed to other hosts. Raises OSError."""
    if address == _LOOPBACK:
        return socket.create_server((address, port), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)
