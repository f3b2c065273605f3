"""How ranks become a tree: each listens, rank 0 tells each its neighbours, each connects to its parent.

They tell each other where they listen through a store (a torch.distributed.Store, or what has its methods): four
requests of a rank, however many ranks there are. Both ends of a connection prove that they know the secret of the
launch, and that of this start, which the store tells: without a secret of the launch, whoever reaches the store can
take part.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.net import handshake
from megatron.net.acceptor import Acceptor
from megatron.net.listening import address_of_interface, address_towards, is_loopback, own_addresses
from megatron.net.secret import VARIABLE
from megatron.parallel.tree import AgreementLostError, AgreementTimeoutError, Neighbour, Tree, tree_nodes

logger = logging.getLogger(__name__)

_CLAIM = struct.Struct("!BI")  # number of the tree, rank
_WHERE, _COUNT, _ALL, _NEIGHBOURS = "tree/where", "tree/count", "tree/all", "tree/neighbours/{}"
_BACKLOG = 128  # children of all trees, and strangers
_SECRET = 16  # bytes
_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Where:
    """Where a rank listens."""

    rank: int
    host: str
    address: str
    port: int


@dataclass(frozen=True)
class Neighbours:
    """Whom a rank is connected with. `secret`: of this start, in hexadecimal digits."""

    parent: Where | None
    children: tuple[tuple[int, str], ...]  # ranks and hosts
    secret: str


class Listener:
    """Where this rank waits for its children."""

    def __init__(self, rank: int, host: str, address: str) -> None:
        """Raises OSError if nobody can listen at `address`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self.where = Where(rank, host, address, int(self._socket.getsockname()[1]))

    def connect(self, neighbours: Neighbours, trees: int, timeout_s: float, secret: bytes = b"") -> list[Tree]:
        """As many trees of the same form, each for a thread of its own; nobody is listened to afterwards.

        `secret`: of the launch. Raises AgreementLostError if the parent cannot be reached or does not know both
        secrets, AgreementTimeoutError if it does not answer, or a child does not come.
        """
        deadline = time.monotonic() + timeout_s
        found: list[Tree] = []
        both = secret + bytes.fromhex(neighbours.secret)
        acceptor = Acceptor([self._socket], both, handshake.AGREEMENT)
        try:
            parents = [self._to_parent(neighbours.parent, both, number, deadline) for number in range(trees)]
            children = self._children(acceptor, neighbours, trees, deadline)
        finally:
            acceptor.close()
        for number, parent in enumerate(parents):
            below = [children[number, rank] for rank, _ in neighbours.children]
            found.append(Tree(self.where.rank, self.where.host, parent, below, timeout_s))
        return found

    def _to_parent(self, parent: Where | None, secret: bytes, number: int, deadline: float) -> Neighbour | None:
        if parent is None:
            return None
        claim, left = _CLAIM.pack(number, self.where.rank), max(0.001, deadline - time.monotonic())
        try:
            sock = handshake.connect((parent.address, parent.port), secret, handshake.AGREEMENT, left, claim)
        except handshake.NoAnswerError as error:  # it listens, and has not come so far
            raise AgreementTimeoutError(
                f"rank {self.where.rank} on {self.where.host} has waited for rank {parent.rank} on {parent.host}"
            ) from error
        except OSError as error:
            known = isinstance(error, (handshake.AuthenticationError, ConnectionResetError, BrokenPipeError))
            helps = f"if that is the wrong network, name the interface of the right one in {_INTERFACE}"
            raise AgreementLostError(
                f"rank {self.where.rank} on {self.where.host} cannot connect to rank {parent.rank} on {parent.host} at "
                f"{parent.address}:{parent.port}: {error.strerror or error}{'' if known else '; ' + helps}"
            ) from error
        return Neighbour(sock, parent.rank, parent.host)

    def _children(
        self, acceptor: Acceptor, neighbours: Neighbours, trees: int, deadline: float
    ) -> dict[tuple[int, int], Neighbour]:
        """By number of the tree and rank."""
        hosts = dict(neighbours.children)
        missing = {(number, rank) for number in range(trees) for rank in hosts}
        found: dict[tuple[int, int], Neighbour] = {}
        while missing:
            left = deadline - time.monotonic()
            acceptor.wait(max(0.0, left))
            come = acceptor.accepted()
            if left <= 0 and not come:
                silent = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in sorted({rank for _, rank in missing}))
                raise AgreementTimeoutError(f"rank {self.where.rank} on {self.where.host} has waited for {silent}")
            for sock, claim in come:
                key = _CLAIM.unpack_from(claim)
                if key not in missing:
                    sock.close()
                    continue
                missing.remove(key)
                found[key] = Neighbour(sock, key[1], hosts[key[1]])
        return found


def neighbours_of_all(everybody: Sequence[Where]) -> list[Neighbours]:
    """By rank; `everybody`: by rank."""
    secret = os.urandom(_SECRET).hex()
    return [
        Neighbours(
            None if place.parent is None else everybody[place.parent],
            tuple((child, everybody[child].host) for child in place.children),
            secret,
        )
        for place in tree_nodes([where.host for where in everybody])
    ]


def connect_all_ranks(
    store: Any, rank: int, world_size: int, host: str, address: str, trees: int, timeout_s: float, secret: bytes = b""
) -> list[Tree]:
    """As many trees over all ranks, which meet at `store`; collective. `address`: where this rank can be reached.

    `secret`: that of the launch, empty without one.

    Raises as Listener, and as the store does if it is gone or a rank does not come in time.
    """
    listener = Listener(rank, host, address)
    store.append(_WHERE, json.dumps(asdict(listener.where)) + "\n")
    if store.add(_COUNT, 1) == world_size:
        store.set(_ALL, "")
    if rank == 0:
        store.wait([_ALL])
        everybody = sorted(
            (Where(**json.loads(line)) for line in store.get(_WHERE).decode().splitlines()), key=lambda w: w.rank
        )
        _tell_of_missing_secret(everybody, secret)
        values = [json.dumps(asdict(one)) for one in neighbours_of_all(everybody)]
        store.multi_set([_NEIGHBOURS.format(rank) for rank in range(world_size)], values)
    mine = json.loads(store.get(_NEIGHBOURS.format(rank)))
    parent = None if mine["parent"] is None else Where(**mine["parent"])
    children = tuple((child, name) for child, name in mine["children"])
    return listener.connect(Neighbours(parent, children, mine["secret"]), trees, timeout_s, secret)


def _tell_of_missing_secret(everybody: Sequence[Where], secret: bytes) -> None:
    hosts = len({where.host for where in everybody})
    if hosts > 1 and not secret:
        logger.warning(
            "%s is not set: whoever reaches the rendezvous store can join the agreements of the ranks on these %d "
            "hosts; give all of them the same, such as the output of `openssl rand -hex 32`", VARIABLE, hosts,
        )  # fmt: skip


def own_address(environment: Mapping[str, str], master: str) -> str:
    """Where other ranks reach this one: at the interface of GLOO_SOCKET_IFNAME, as gloo; else at the address from which
    this host reaches `master`.

    On the host of `master` its name may stand for the loopback's address, which says nothing to other hosts: then it is
    the address from which this host reaches others. Raises ValueError naming the variable if there is none.
    """
    named = environment.get(_INTERFACE, "").split(",")[0].strip()
    if named:
        found = address_of_interface(named)
        if found is None:
            raise ValueError(
                f"{_INTERFACE} {named}: host {socket.gethostname()} has no interface of that name with an address; "
                "name one that every host has"
            )
        return found
    found = address_towards((master, 9))
    if found is not None and is_loopback(found) and not (is_loopback(master) or master == "localhost"):
        found = next(iter(own_addresses(master)), found)
    if found is None:
        raise ValueError(
            f"host {socket.gethostname()} reaches no other host, not {master} either: correct MASTER_ADDR, or name its "
            f"interface in {_INTERFACE}"
        )
    return found
