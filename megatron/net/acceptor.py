"""Accepts connections of processes that know the secret of the launch. Its one thread never waits for a client.

Until it is authenticated, a connection costs a descriptor and a few hundred bytes, or a session of TLS. It has
`PATIENCE_S`, and there are at most `MOST` of them. Whoever comes when there are as many waits in the kernel's backlog
until one is through or has to give way: one that has not begun the handshake when it is `SILENT_S` old, another when it
is `SURE_S` old. Strangers delay others by that for each `MOST` of them that came before; those that come faster keep
others out meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from collections.abc import Sequence

from megatron.net.handshake import ServerSide
from megatron.net.tls import tls_of_launch

MOST = 256
PATIENCE_S = 10.0
SILENT_S = 0.1  # a client of the launch speaks first, and at once
SURE_S = 1.0
_POLL_S = 0.1


class Acceptor:
    """Takes the sockets `listening` over; with TLS if the launch uses it. Raises TlsSettingsError if it cannot.

    Call `accepted` when `fileno` can be read, and some times a second, or after `wait`.
    """

    def __init__(self, listening: Sequence[socket.socket], secret: bytes, purpose: bytes) -> None:
        self._listening = list(listening)
        self._secret, self._purpose = secret, purpose
        self._tls = tls_of_launch()
        self._epoll = select.epoll()
        for one in self._listening:
            one.setblocking(False)
            self._epoll.register(one, select.EPOLLIN)
        self._waiting: dict[int, ServerSide] = {}  # by descriptor, the oldest first
        self._watched = True  # whether a new connection wakes the caller

    def fileno(self) -> int:
        return self._epoll.fileno()

    def wait(self, at_most_s: float = math.inf) -> None:
        """Until `accepted` has something to do."""
        limit = min(at_most_s, _POLL_S if self._waiting or not self._watched else math.inf)
        self._epoll.poll(None if limit == math.inf else limit)

    def accepted(self) -> list[tuple[socket.socket, bytes]]:
        """Connections that have been authenticated since the last call, none of which blocks, and their claims."""
        found: list[tuple[socket.socket, bytes]] = []
        for descriptor, _ in self._epoll.poll(0):
            if descriptor in self._waiting:
                self._go_on(self._waiting[descriptor], found)
        self._drop_before(time.monotonic() - PATIENCE_S)
        full = any([self._accept_all(one, found) for one in self._listening])
        if full == self._watched:  # while nobody is accepted, who waits must not wake the caller
            self._watched = not full
            for one in self._listening:
                self._epoll.modify(one, select.EPOLLIN if self._watched else 0)
        return found

    def close(self) -> None:
        """Nobody is let in any more; those that were stay connected."""
        for side in list(self._waiting.values()):
            self._drop(side)
        self._epoll.close()
        for one in self._listening:
            one.close()

    def _accept_all(self, listening: socket.socket, found: list[tuple[socket.socket, bytes]]) -> bool:
        """Accept whoever waits; whether some may be left for whom there is no room."""
        while True:
            if len(self._waiting) >= MOST:
                self._make_room()
            if len(self._waiting) >= MOST:
                return True
            try:
                connected, _ = listening.accept()
            except BlockingIOError:
                return False
            except ConnectionAbortedError:  # it has left already
                continue
            except OSError:  # no descriptor is left
                self._make_room()
                return True
            try:
                side = ServerSide(connected, self._secret, self._purpose, self._tls)
            except OSError:  # it has left already
                connected.close()
                continue
            self._waiting[side.connected.fileno()] = side
            self._epoll.register(side.connected, select.EPOLLIN)
            self._go_on(side, found)

    def _go_on(self, side: ServerSide, found: list[tuple[socket.socket, bytes]]) -> None:
        outcome = side.go_on()
        if outcome is None:
            return
        if not outcome:
            self._drop(side)
            return
        del self._waiting[side.connected.fileno()]
        self._epoll.unregister(side.connected)
        found.append((side.connected, side.claim))

    def _drop_before(self, began: float) -> None:
        """Close those that have begun before that."""
        for side in list(self._waiting.values()):
            if side.began < began:
                self._drop(side)

    def _make_room(self) -> None:
        """Close the oldest that has to give way, if there is one."""
        now = time.monotonic()
        for side in self._waiting.values():
            if now - side.began > (SURE_S if side.has_begun else SILENT_S):
                self._drop(side)
                return

    def _drop(self, side: ServerSide) -> None:
        del self._waiting[side.connected.fileno()]
        with contextlib.suppress(OSError):
            self._epoll.unregister(side.connected)
        side.connected.close()
