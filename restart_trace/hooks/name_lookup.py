"""Measures how long this host takes to look up the host name of the rendezvous address, as torch does repeatedly.

torch's TCPStore looks up the host name of every peer for its log: a client that of the server before it connects, the
server that of each client, in the thread that serves all clients. If a name server does not answer, each lookup takes
seconds, which torch does not report. The first rank of a host therefore does one such lookup, during the rendezvous.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

from restart_trace.clock import now_ns
from restart_trace.hooks.session import Session

THREAD_NAME = "name-lookup"


def time_name_lookup(session: Session) -> None:
    """Do a lookup on a thread, and record its time as phase `name_lookup` if the start-up is still in progress."""
    startup, address = session.startup, os.environ.get("MASTER_ADDR")
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK"))
    if startup is None or startup.operation is None or address is None or local_rank != "0":
        return
    operation = startup.operation

    def ask() -> None:
        begin = now_ns()
        with suppress(OSError):  # no name, or no address, was found: the time counts all the same
            socket.getnameinfo(_as_peer(address), 0)
        if startup.operation is operation:
            operation.add("name_lookup", None, begin, now_ns(), blocking=False, thread=THREAD_NAME)

    if not any(thread.name == THREAD_NAME for thread in threading.enumerate()):  # rendezvous calls may be nested
        threading.Thread(target=ask, name=THREAD_NAME, daemon=True).start()


def _as_peer(address: str) -> tuple[str, int]:
    """The address as torch's store has it, which uses IPv6 sockets: ::ffff:127.0.0.1. Raises OSError."""
    found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    family, _, _, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
    return (f"::ffff:{where[0]}" if family == socket.AF_INET else str(where[0])), 0
