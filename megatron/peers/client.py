"""A rank's requests to holders of copies: its own host's holder sends and lists copies, a peer's returns one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.peers.pacing import Pacing
from megatron.peers.wire import Channel, Key, PeerError, connect, file_size, key_of
from restart_trace.cycles import LAUNCH_ID_VARIABLE

VARIABLE = "MEGATRON_MEMORY_COPIES"  # ADDRESS:PORT of this host's process; unset: the launcher has none
WAITING_VARIABLE = "MEGATRON_MEMORY_COPIES_WAITING"  # JSON: (host, address, port) of those of hosts without ranks
MEMBERS_VARIABLE = "MEGATRON_MEMORY_COPIES_OF_MEMBERS"  # of all hosts that train: [[HOST, ADDRESS, PORT], ...], by node
_LOOPBACK = "127.0.0.1"


class Peer(NamedTuple):
    """The process that holds copies on a host. `address`: where other hosts reach it."""

    host: str
    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.host} ({self.address}:{self.port})"


def own_peer() -> Peer | None:
    """That of this host; None if the launcher has started none."""
    address, _, port = os.environ.get(VARIABLE, "").rpartition(":")
    return Peer(os.uname().nodename, address, int(port)) if address else None


def tell_of_waiting(peers: Sequence[Peer]) -> None:
    """In an agent, before it forks ranks: those of hosts of the launch on which no rank runs."""
    os.environ[WAITING_VARIABLE] = json.dumps(peers)


def waiting_peers() -> list[Peer]:
    """In a rank: what the agent was told of."""
    return [Peer(*peer) for peer in json.loads(os.environ.get(WAITING_VARIABLE) or "[]")]


def take_members() -> list[Peer]:
    """Those of all hosts that train, by node rank; none if the launcher has told of none.

    The variable is removed: it grows with the hosts, and a process that a rank starts needs none of it.
    """
    return [Peer(*member) for member in json.loads(os.environ.pop(MEMBERS_VARIABLE, "[]"))]


class Sent(NamedTuple):
    """What came of sending copies. `interleaved`: what `Traffic.statistics` returns; empty if they went at once.

    `compressed`: as of `wire.Compressed`, of all copies; empty if they went as they are.
    """

    num_bytes: int
    errors: list[str]
    interleaved: Mapping[str, Any]
    compressed: Mapping[str, Any]

    @property
    def wire_bytes(self) -> int:
        """Bytes of the copies as they were sent."""
        return int(self.compressed.get("wire_bytes", self.num_bytes))


def ask(peer: Peer, deadline_s: float, *, launch: str | None = None, **message: Any) -> dict[str, Any]:
    """One question and its answer. `launch`: its id, for who is no rank of it. Raises PeerError naming the peer."""
    try:
        with connect(_reached_at(peer), peer.port, deadline_s) as channel:
            channel.tell(launch=_launch() if launch is None else launch, **message)
            answer = channel.hear()
            while answer.get("at_work"):
                answer = channel.hear()
            return answer
    except PeerError as error:
        raise PeerError(f"{peer} {error}") from error


def tell(port: int, at_most_s: float, **message: Any) -> None:
    """Say something to this host's process, and wait for no answer to it.

    The process has to let the caller in within `at_most_s`, for the connection and for each step after it. Raises
    PeerError if it does not.
    """
    with connect(_LOOPBACK, port, at_most_s) as channel:
        channel.tell(launch=_launch(), **message)


def send_copies(
    own: Peer, slot: int, peers: Sequence[Peer], keep: str | None, deadline_s: float, interleave: Pacing | None = None
) -> Sent:
    """Have the save in a slot of this host copied to `peers`; `errors` says what went wrong with which.

    `slot`: its number among those of this host. `keep`: the save that no peer may overwrite. `interleave`: send
    while training leaves the network idle, so paced, and at once when it waits (`traffic`). Raises PeerError.
    """
    request = {"slot": slot, "peers": peers, "keep": keep, "timeout_s": deadline_s, "interleave": interleave}
    answer = ask(own, deadline_s, ask="send", **request)
    errors = [str(text) for text in answer["errors"]]
    return Sent(int(answer["bytes"]), errors, answer["interleaved"], answer["compressed"])


def fetch(
    peer: Peer,
    save: str,
    key: Key,
    room: Callable[[int], memoryview],
    deadline_s: float,
    began: Callable[[Channel], object] = lambda _: None,
) -> dict[str, Any]:
    """Get the file of a save of the coordinates `key` into what `room` returns for its size; the record, verified.

    `began` is told the connection, which another thread may abort. Raises PeerError naming the peer: its copy is
    damaged, it is stalled, or sends something else than it says.
    """
    try:
        with connect(_reached_at(peer), peer.port, deadline_s) as channel:
            began(channel)
            channel.tell(launch=_launch(), ask="get", save=save, key=key)
            answer = channel.hear()
            record: Mapping[str, Any] = answer.get("record", {})
            if record.get("save") != save or key_of(record) != key:
                raise PeerError(f"sends another save than {save} of {key}")
            channel.receive_file(room(file_size(record)), record, answer.get("compressed") is True)
            return dict(record)
    except PeerError as error:
        raise PeerError(f"{peer} {error}") from error


def fetch_parts(
    peer: Peer, save: str, key: Key, parts: Sequence[tuple[int, int]], into: memoryview, deadline_s: float
) -> None:
    """Get bytes [start, stop) of the file of a save of `key` to the same place of `into`; nothing is verified yet.

    Raises PeerError naming the peer: it does not hold the save, has another size of it, or is stalled.
    """
    try:
        with connect(_reached_at(peer), peer.port, deadline_s) as channel:
            channel.tell(launch=_launch(), ask="get", save=save, key=key, parts=parts)
            answer = channel.hear()
            record: Mapping[str, Any] = answer.get("record", {})
            if record.get("save") != save or key_of(record) != key or file_size(record) != len(into):
                raise PeerError(f"sends another save than {save} of {key}")
            wanted = [into[start:stop] for start, stop in parts]
            channel.receive_parts(wanted, answer.get("compressed") is True)
    except PeerError as error:
        raise PeerError(f"{peer} {error}") from error


def _launch() -> str:
    return os.environ.get(LAUNCH_ID_VARIABLE, "")


def _reached_at(peer: Peer) -> str:
    """Its own host may not resolve the name that others use."""
    return _LOOPBACK if peer == own_peer() else peer.address
