"""Messages between the coordinator and the agents of a launch: JSON objects, one a line, over one TCP connection each.

Neither side ever blocks on the other: what cannot be sent at once is kept, and a peer that reads nothing is found by
its silence (see agent.py and coordinator.py). The kernel is asked to send at once (TCP_NODELAY): messages are small.
"""

from __future__ import annotations

import json
import socket
from typing import Any

_CHUNK = 1 << 16
_LONGEST = 1 << 20  # a peer that sends more than this without an end of line speaks something else
# Of the heartbeat timeout: how often an agent tells that it lives, and for how long after the last beat that was
# answered it lets its ranks run. The latter must be less than 1: ranks of a node that is cut off have to be gone
# before the coordinator, which counts from the arrival of that beat, has others take their place.
BEATS_PER_TIMEOUT = 5
LEASE = 0.8


class Connection:
    """One end of a connection that is made; not for several threads."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._received = b""
        self._unsent = b""
        self.ended = False  # the peer has closed it, or it broke

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, **content: Any) -> None:
        """Send a message, or as much of it as the peer takes now; the rest goes with the next call."""
        self._unsent += json.dumps({"type": kind} | content).encode() + b"\n"
        self.flush()

    def flush(self) -> bool:
        """Send what is left; whether nothing is."""
        while self._unsent and not self.ended:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                return False
            except OSError:
                self.ended = True
        return True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived completely; a line that is no message ends the connection."""
        while not self.ended:
            try:
                got = self._socket.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                got = b""
            self._received += got
            self.ended = not got or len(self._received) > _LONGEST
        *lines, self._received = self._received.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            self.ended = True
            return []
        if not all(isinstance(message, dict) and isinstance(message.get("type"), str) for message in messages):
            self.ended = True
            return []
        return messages

    def close(self) -> None:
        self._socket.close()
