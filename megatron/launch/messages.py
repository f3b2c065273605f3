"""Messages between the coordinator and the agents of a launch: JSON objects, one a line, over one TCP connection each.
Those of a launch that is started by hand on each node (check_hosts.py) are of the same kind. Both ends have proved
that they know the secret of the launch before the first message (megatron.net.handshake).

Neither side ever blocks on the other: what cannot be sent at once is kept, and a peer that reads nothing is found by
its silence (see agent.py and coordinator.py). The kernel is asked to send at once (TCP_NODELAY): messages are small.
"""

from __future__ import annotations

import json
import socket
from typing import Any

_CHUNK = 1 << 16
_LONGEST = 1 << 20  # bytes of what has come and was not taken: a peer that sends more at once speaks something else
_MOST_UNSENT = 16 << 20  # bytes: a peer that has left so much unread reads nothing; of 10,000 hosts all take 1 MiB
# Of the heartbeat timeout: how often an agent tells that it lives, and for how long after the last beat that was
# answered it lets its ranks run. The latter must be less than 1: ranks of a node that is cut off have to be gone
# before the coordinator, which counts from the arrival of that beat, has others take their place. An agent that has not
# killed them by FENCE is itself killed.
BEATS_PER_TIMEOUT = 5
LEASE = 0.8
FENCE = 0.9
SUSPECTED = 0.5  # of the heartbeat timeout: a node silent for so long may be lost, and a spare prepares for its place

# type of message -> its fields. What comes over the network from anything else than the other end must stop nothing.
_FIELDS: dict[str, dict[str, type]] = {
    # to the coordinator
    "hello": {
        "number": int, "address": str, "host": str, "ranks": int, "launch_id": str, "versions": dict,
        "copies": int,  # port of its process that holds copies of saves; 0: it has none
        "place": int,  # the node rank of its ranks until its coordinator was lost; -1: it had none
        "instance": str,  # of this process of the agent alone: it keeps it when it connects again
    },
    "beat": {"number": int},
    "port": {"generation": int, "port": int},
    "cannot": {"generation": int, "why": str},
    "failed": {"generation": int, "why": str},
    "unfit": {"generation": int, "why": str},  # -1: of a host on which no ranks run
    "ended": {
        "generation": int, "failures": list,
        "refused": int,  # as megatron.launch.ranks.Ranks has it
    },
    # to an agent
    "welcome": {"heartbeat_timeout_s": float, "launch_id": str},
    "refuse": {"why": str},  # empty where the coordinator's own message is seen with what the agent prints
    "ack": {"number": int},
    "serve": {"generation": int},
    "start": {
        "generation": int, "nnodes": int, "node_rank": int, "master_addr": str, "master_port": int, "max_restarts": int,
        "arguments": list, "waiting": list,
        "copies": list,  # [host, address, port] of each member's process that holds copies
    },
    "wait": {"copies": list},  # to a spare, as of "start"
    "expect": {"node_rank": int, "copies": list},  # to a spare: of those that are heard, the nearest ones first
    "stop": {"generation": int, "kill": bool, "why": str},
    "exit": {"code": int},
    # between launch scripts
    "here": {"place": int, "host": str, "runs": dict},
    "refused": {"why": str},
    "compared": {"wrong": str},
    # to either
    "signal": {"signum": int},
}  # fmt: skip


def _is_message(value: Any) -> bool:
    """Whether a decoded line has a known type and each field of it with its type, a number of seconds also as int."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str) or value["type"] not in _FIELDS:
        return False
    fields = _FIELDS[value["type"]]
    return all(type(value.get(name)) in ((float, int) if kind is float else (kind,)) for name, kind in fields.items())


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
                self.ended = len(self._unsent) > _MOST_UNSENT
                return False
            except OSError:
                self.ended = True
        return True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived completely, each with its fields; a line that is none ends the connection."""
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
        if not all(map(_is_message, messages)):
            self.ended = True
            return []
        return messages

    def close(self) -> None:
        self._socket.close()
