"""A tree over all ranks, for small agreements on the host: each rank talks with its parent and its children alone.

The first rank of a host leads it. The leaders are a heap of LEADERS, the ranks of a host one of LOCAL under its leader:
no rank has more than 1 + LEADERS + LOCAL connections, however many ranks there are. What goes up is merged where
branches meet; what goes down is passed on as it came. Nothing here imports torch.

A rank that can no longer agree tells its neighbours why before it closes its connections, and they theirs. So all
ranks hear of a rank that has ended at their next agreement at the latest. An operation for which everything has
arrived is done even so: what a rank was sent in full does not depend on what came after it. Who is missing when a
deadline has passed is not for the tree to say: a neighbour that is silent may itself wait
(megatron.startup.roll_call).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

from megatron.net.connection import Connection

LEADERS = 8
LOCAL = 16

_ENTRY = struct.Struct("!IQ")  # rank, bytes that follow
_RANK = struct.Struct("!I")
_UP, _DOWN, _LOST, _LATE = "up", "down", "lost", "late"
_DOES = {_UP: "collects from all ranks", _DOWN: "tells all ranks", _LOST: "has lost a rank", _LATE: "waited too long"}
_LONGEST_HEAD = 100  # bytes: kind and number of an operation
_LONGEST = 1 << 34  # bytes of what one operation sends: the files of a save of 10,000 ranks take a thousandth


class AgreementLostError(RuntimeError):
    """The ranks can no longer agree: one has ended, or took longer than --distributed-timeout-minutes."""


class AgreementTimeoutError(AgreementLostError):
    """A rank has waited longer than --distributed-timeout-minutes, this one or another."""


class TreeNode(NamedTuple):
    """Where a rank is in the tree, by rank."""

    parent: int | None
    children: tuple[int, ...]


def tree_nodes(hosts: Sequence[str]) -> list[TreeNode]:
    """The place of each rank; `hosts`: the host of each. Rank 0 is the root."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    groups = [([ranks[0] for ranks in by_host.values()], LEADERS), *((ranks, LOCAL) for ranks in by_host.values())]
    parents: dict[int, int] = {}
    children: list[list[int]] = [[] for _ in hosts]
    for members, fan_out in groups:
        for index in range(1, len(members)):
            parents[members[index]] = members[(index - 1) // fan_out]
            children[members[(index - 1) // fan_out]].append(members[index])
    return [TreeNode(parents.get(rank), tuple(children[rank])) for rank in range(len(hosts))]


class Neighbour(Connection):
    """The connection to a rank next to this one. `sock` belongs to it from then on.

    `frames`: kind, number of the operation, content: what has come and is not used yet.
    """

    def __init__(self, sock: socket.socket, rank: int, host: str) -> None:
        super().__init__(sock, _LONGEST_HEAD, longest_payload=_LONGEST)
        # A connection whose host is gone ends after about two minutes. No TCP_USER_TIMEOUT: it also ends one to a
        # process that is alive and too busy to read.
        self.keep_alive(idle_s=60, interval_s=10, count=6)
        self.name = f"rank {rank} on {host}"
        self.frames: deque[tuple[str, int, bytes]] = deque()

    @property
    def has_answered(self) -> bool:
        """Whether its part of an operation is the next of `frames`, and not the end of all agreements."""
        return bool(self.frames) and self.frames[0][0] not in (_LOST, _LATE)

    def take(self) -> None:
        """Add what has come to `frames`."""
        for head, content in self.receive():
            kind, number = head.get("kind"), head.get("number")
            if not isinstance(kind, str) or kind not in _DOES or type(number) is not int:
                self.ended = "sends what is no agreement"
                return
            self.frames.append((kind, number, content))

    def send(self, kind: str, number: int, content: bytes) -> None:
        """Send as much as goes at once; the rest by `flush`."""
        self.put({"kind": kind, "number": number}, content)

    def flush(self) -> bool:
        done = super().flush()
        if self.ended is not None:
            self.take()  # what the neighbour has said before it ended
        return done

    def say_last(self, kind: str, content: bytes) -> None:
        """Tell the neighbour why it will hear nothing more, if that is possible without waiting."""
        self.put_last({"kind": kind, "number": 0}, content)


class Tree:
    """The connections of one rank in a tree, for one thread. No neighbours: all is between the rank and itself.

    `timeout_s`: how long an operation waits. Whatever goes wrong between the ranks closes it: AgreementLostError
    then, and for every operation after that. Who leaves an operation otherwise, by an interrupt, has to `give_up`.
    """

    def __init__(self, rank: int, host: str, parent: Neighbour | None, children: Sequence[Neighbour],
                 timeout_s: float) -> None:  # fmt: skip
        self.name = f"rank {rank} on {host}"
        self._rank = rank
        self._parent, self._children = parent, list(children)
        self._timeout_s = timeout_s
        self._number = 0
        self._below: list[list[int]] | None = None  # of each child: it and the ranks below it, once one had to know
        self._deadline = 0.0
        self._lost: AgreementLostError | None = None
        self._open = {c.fileno(): c for c in ([] if parent is None else [parent]) + self._children}
        self._poll = select.poll()
        for descriptor in self._open:
            self._poll.register(descriptor, select.POLLIN)
        _trees.add(self)

    @property
    def closed(self) -> bool:
        return self._lost is not None

    @property
    def connections(self) -> int:
        """How many there are: those to the parent and to the children."""
        return len(self._open)

    def up(self, item: bytes | None) -> list[tuple[int, bytes]] | None:
        """On rank 0: (rank, item) of all ranks that gave one, by rank; None elsewhere, where nobody is waited for but
        the ranks below.

        Raises AgreementLostError; AgreementTimeoutError if it is because of a deadline.
        """
        self._begin()
        below = self._receive(_UP, self._children)
        mine = b"" if item is None else _ENTRY.pack(self._rank, len(item)) + item
        merged = b"".join((mine, *below))
        if self._parent is None:
            return sorted(_entries(merged))
        self._send(_UP, [self._parent], [merged])
        return None

    def down(self, item: bytes) -> bytes:
        """Rank 0's item, on every rank. Raises as `up`."""
        self._begin()
        found = item if self._parent is None else self._receive(_DOWN, [self._parent])[0]
        self._send(_DOWN, self._children, [found] * len(self._children))
        return found

    def scatter(self, items: Sequence[bytes] | None) -> bytes:
        """What rank 0 has for this rank: `items`, by rank. Nobody hears of what is for ranks that are not below it.

        Raises as `up`.
        """
        if self._below is None:
            self._below = self._ranks_below()
        self._begin()
        if self._parent is None:
            assert items is not None
            mine = dict(enumerate(items))
        else:
            mine = dict(_entries(self._receive(_DOWN, [self._parent])[0]))
        parts = [b"".join(_ENTRY.pack(rank, len(mine[rank])) + mine[rank] for rank in ranks) for ranks in self._below]
        self._send(_DOWN, self._children, parts)
        return mine[self._rank]

    def _ranks_below(self) -> list[list[int]]:
        """Of each child, it and the ranks below it; collective."""
        self._begin()
        received = self._receive(_UP, self._children)
        if self._parent is not None:
            self._send(_UP, [self._parent], [_RANK.pack(self._rank) + b"".join(received)])
        return [[rank for (rank,) in _RANK.iter_unpack(ranks)] for ranks in received]

    def give_up(self, why: str) -> None:
        """Close the connections, and let all ranks know why. Does nothing once it is closed."""
        if self._lost is None:
            self._end(_LOST, f"{self.name}: {why}")

    def close(self) -> None:
        """Close the connections; the ranks have agreed on all that there was to agree on."""
        self._lost = self._lost or AgreementLostError("the connections for agreements are closed")
        for connection in self._open.values():
            connection.close()
        self._open.clear()
        _trees.discard(self)

    def _begin(self) -> None:
        if self._lost is not None:
            raise AgreementLostError(f"an earlier agreement of the ranks has failed: {self._lost}") from self._lost
        if any(c.frames and not c.has_answered for c in self._open.values()):
            self._check([])
        self._number += 1
        self._deadline = time.monotonic() + self._timeout_s

    def _receive(self, kind: str, senders: Sequence[Neighbour]) -> list[bytes]:
        """What each of them sends in this operation."""
        others = [c for c in self._open.values() if c not in senders]  # they are sent to afterwards
        while not all(c.has_answered for c in senders):
            self._wait([*(c for c in senders if not c.has_answered), *others])
        found: list[bytes] = []
        for connection in senders:
            theirs, number, content = connection.frames.popleft()
            if (theirs, number) != (kind, self._number):
                self._fail(
                    _LOST,
                    f"{self.name} {_DOES[kind]} in agreement {self._number}, and {connection.name} {_DOES[theirs]} "
                    f"in agreement {number}: the ranks do not do the same, which is a defect of the program",
                )
            found.append(content)
        return found

    def _send(self, kind: str, receivers: Sequence[Neighbour], contents: Sequence[bytes]) -> None:
        """Raises if one cannot be sent its part, once all others have theirs: it may say that a save is committed."""
        for connection, content in zip(receivers, contents, strict=True):
            connection.send(kind, self._number, content)
            if connection.unsent and connection.ended is None:  # else it may not be polled any more
                self._poll.modify(connection, select.POLLIN | select.POLLOUT)
        while under_way := [c for c in receivers if c.unsent and c.ended is None]:
            self._wait(under_way)
        if ended := [c for c in receivers if c.unsent]:
            self._check(ended)

    def _wait(self, needed: Iterable[Neighbour]) -> None:
        """Until something can be received or sent. Raises if one of `needed` has ended."""
        self._check(needed)
        left = self._deadline - time.monotonic()
        ready = self._poll.poll(1000 * max(0.0, left))
        if left <= 0 and not ready:  # this rank may itself have been stopped: what has come meanwhile is taken first
            silent = ", ".join(c.name for c in needed)
            self._fail(_LATE, f"{self.name} has waited {self._timeout_s:g} s for {silent}, or for ranks behind them")
        for descriptor, events in ready:
            connection = self._open[descriptor]
            if events & select.POLLOUT and connection.unsent and connection.flush():
                self._poll.modify(connection, select.POLLIN)
            if events & ~select.POLLOUT:
                connection.take()
            if connection.ended is not None:
                self._poll.unregister(connection)

    def _check(self, needed: Iterable[Neighbour]) -> None:
        """Raise if a neighbour has told of an end, or has itself ended though it is waited for."""
        for connection in self._open.values():
            for kind, _, content in connection.frames:
                if kind in (_LOST, _LATE):
                    self._fail(kind, content.decode(), told_by=connection)
        for connection in needed:
            if connection.ended is not None and (not connection.frames or connection.unsent):
                self._fail(_LOST, f"lost the connection to {connection.name}: it {connection.ended}")

    def _fail(self, kind: str, why: str, told_by: Neighbour | None = None) -> NoReturn:
        raise self._end(kind, why, told_by)

    def _end(self, kind: str, why: str, told_by: Neighbour | None = None) -> AgreementLostError:
        """Pass `why` on to the neighbours, close, and remember it."""
        self._lost = (AgreementTimeoutError if kind == _LATE else AgreementLostError)(why)
        for connection in self._open.values():
            if connection is not told_by:
                connection.say_last(kind, why.encode(errors="replace"))
        self.close()
        return self._lost


def _entries(merged: bytes) -> Iterator[tuple[int, bytes]]:
    view, at = memoryview(merged), 0
    while at < len(view):
        rank, length = _ENTRY.unpack_from(view, at)
        at += _ENTRY.size
        yield rank, bytes(view[at : at + length])
        at += length


_trees: weakref.WeakSet[Tree] = weakref.WeakSet()


def close_trees() -> None:
    """Close the connections of all trees of this process.

    In a forked process, too: while it has copies of the connections, the others do not see the end of the rank.
    """
    for tree in list(_trees):
        tree.close()


os.register_at_fork(after_in_child=close_trees)
