"""The messages between the coordinator and an agent, and between launch scripts that compare their hosts.

A message is a JSON object with a type and the fields of that type. Neither end waits for the other: what cannot be sent
at once is kept (megatron.net.connection), and an end that reads nothing is found by its silence (agent.py,
coordinator.py).
"""

from __future__ import annotations

import socket
from typing import Any

from megatron.net.connection import Connection

_LONGEST = 16 << 20  # bytes of a message; one that names 10,000 hosts has 1 MiB
_MOST_UNSENT = 16 << 20  # bytes: an end that has left so much unread reads nothing
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
    """Whether an object has a known type and each field of it with its type, a number of seconds also as int."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str) or value["type"] not in _FIELDS:
        return False
    fields = _FIELDS[value["type"]]
    return all(type(value.get(name)) in ((float, int) if kind is float else (kind,)) for name, kind in fields.items())


class LaunchConnection(Connection):
    """One end of a connection between coordinator and agent, or between launch scripts. It never waits."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected, _LONGEST, most_unsent=_MOST_UNSENT)

    def send(self, kind: str, **content: Any) -> None:
        """Send a message, or as much of it as the other end takes now; the rest goes with the next call."""
        self.put({"type": kind} | content)

    def messages(self) -> list[dict[str, Any]]:
        """The messages that have arrived completely, each with its fields; one that lacks some ends the connection."""
        found = [content for content, _ in self.receive()]
        if not all(map(_is_message, found)):
            self.ended = "sends what is no message of a launch"
            return []
        return found
