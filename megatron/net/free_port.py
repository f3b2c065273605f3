"""A TCP port of this host for the rendezvous of a launch."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 20000


def free_port() -> int:
    """A port that nobody listens on, out of those that the kernel gives to no connection by itself.

    Between this answer and the rendezvous that listens there, connections of other processes are made. Each takes a
    port of the ephemeral range (ip(7), ip_local_port_range), so one of that range could be gone by then.
    Raises OSError if none can be had.
    """
    below = range(_FIRST, min(_ephemeral()[0], 65536))
    for _ in range(64 if below else 0):
        try:
            return _bound(below[int.from_bytes(os.urandom(4), "big") % len(below)])
        except OSError:
            continue
    return _bound(0)  # a host whose ephemeral range begins low: the kernel chooses


def _bound(port: int) -> int:
    with socket.socket() as probe:
        probe.bind(("", port))
        return int(probe.getsockname()[1])


def _ephemeral() -> tuple[int, int]:
    try:
        low, high = _EPHEMERAL_RANGE.read_text().split()
    except (OSError, ValueError):
        return 32768, 60999
    return int(low), int(high)
