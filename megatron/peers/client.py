"""What a rank asks of the processes that hold copies: its own host's to send and to list them, a peer's to give one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.peers.wire import Key, PeerError, connect, file_size, key_of
from restart_trace.cycles import LAUNCH_ID_VARIABLE

VARIABLE = "MEGATRON_MEMORY_COPIES"  # ADDRESS:PORT of this host's process; unset: the launcher has none
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


class Sent(NamedTuple):
    """What came of sending copies. `interleaved`: what `Traffic.told` says; empty if they went at once."""

    num_bytes: int
    errors: list[str]
    interleaved: Mapping[str, Any]


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


def send_copies(
    own: Peer, slot: int, peers: Sequence[Peer], keep: str | None, deadline_s: float, interleave: bool = False
) -> Sent:
    """Have the save in a slot of this host copied to `peers`; `errors` says what went wrong with which.

    `slot`: its number among those of this host. `keep`: the save that no peer may overwrite. `interleave`: send
    while training leaves the network idle, and at once when it waits (`traffic`). Raises PeerError.
    """
    told = {"slot": slot, "peers": peers, "keep": keep, "timeout_s": deadline_s, "interleave": interleave}
    answer = ask(own, deadline_s, ask="send", **told)
    return Sent(int(answer["bytes"]), [str(text) for text in answer["errors"]], answer["interleaved"])


def fetch(peer: Peer, save: str, key: Key, room: Callable[[int], memoryview], deadline_s: float) -> dict[str, Any]:
    """Get the file of a save of the coordinates `key` into what `room` returns for its size; the record, verified.

    Raises PeerError naming the peer: its copy is damaged, it is stalled, or sends something else than it says.
    """
    try:
        with connect(_reached_at(peer), peer.port, deadline_s) as channel:
            channel.tell(launch=_launch(), ask="get", save=save, key=key)
            record: Mapping[str, Any] = channel.hear().get("record", {})
            if record.get("save") != save or key_of(record) != key:
                raise PeerError(f"sends another save than {save} of {key}")
            channel.receive_file(room(file_size(record)), record)
            return dict(record)
    except PeerError as error:
        raise PeerError(f"{peer} {error}") from error


def _launch() -> str:
    return os.environ.get(LAUNCH_ID_VARIABLE, "")


def _reached_at(peer: Peer) -> str:
    """Its own host may not resolve the name that others use."""
    return _LOOPBACK if peer == own_peer() else peer.address
