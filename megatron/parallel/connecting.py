"""How ranks become a tree: each listens, rank 0 tells each its neighbours, each connects to its parent.

They tell each other where they listen through a store (a torch.distributed.Store, or what has its methods): four
requests of a rank, however many ranks there are. A connection that does not begin with the secret of this start, which
the store tells too, is closed: the address may be open to a whole network.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.parallel.tree import AgreementLostError, AgreementTimeoutError, Connection, Tree, tree_nodes

_HELLO = struct.Struct("!16sBI")  # secret, number of the tree, rank
_WHERE, _COUNT, _ALL, _NEIGHBOURS = "tree/where", "tree/count", "tree/all", "tree/neighbours/{}"
_BACKLOG = 128  # children of all trees, and strangers
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IFNAMSIZ = 16
_OUTSIDE = ("192.0.2.1", 9)  # of no network (RFC 5737); nothing is sent there


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

    def connect(self, neighbours: Neighbours, trees: int, timeout_s: float) -> list[Tree]:
        """As many trees of the same form, each for a thread of its own; nobody is listened to afterwards.

        Raises AgreementLostError if the parent cannot be reached, AgreementTimeoutError if a child does not come.
        """
        deadline = time.monotonic() + timeout_s
        found: list[Tree] = []
        try:
            parents = [self._to_parent(neighbours, number, deadline) for number in range(trees)]
            children = self._children(neighbours, trees, deadline)
        finally:
            self._socket.close()
        for number, parent in enumerate(parents):
            below = [children[number, rank] for rank, _ in neighbours.children]
            found.append(Tree(self.where.rank, self.where.host, parent, below, timeout_s))
        return found

    def _to_parent(self, neighbours: Neighbours, number: int, deadline: float) -> Connection | None:
        parent = neighbours.parent
        if parent is None:
            return None
        try:
            sock = socket.create_connection((parent.address, parent.port), max(0.001, deadline - time.monotonic()))
        except OSError as error:
            raise AgreementLostError(
                f"rank {self.where.rank} on {self.where.host} cannot connect to rank {parent.rank} on {parent.host} at "
                f"{parent.address}:{parent.port}: {error.strerror or error}; if that is the wrong network, name the "
                f"interface of the right one in {_INTERFACE}"
            ) from error
        sock.sendall(_HELLO.pack(bytes.fromhex(neighbours.secret), number, self.where.rank))
        return Connection(sock, parent.rank, parent.host)

    def _children(self, neighbours: Neighbours, trees: int, deadline: float) -> dict[tuple[int, int], Connection]:
        """By number of the tree and rank."""
        hosts = dict(neighbours.children)
        missing = {(number, rank) for number in range(trees) for rank in hosts}
        found: dict[tuple[int, int], Connection] = {}
        greeting: dict[int, tuple[socket.socket, bytearray]] = {}  # by descriptor
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while missing:
            ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                silent = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in sorted({rank for _, rank in missing}))
                raise AgreementTimeoutError(f"rank {self.where.rank} on {self.where.host} has waited for {silent}")
            for descriptor, _ in ready:
                if descriptor == self._socket.fileno():
                    sock = self._socket.accept()[0]
                    sock.setblocking(False)
                    greeting[sock.fileno()] = sock, bytearray()
                    poll.register(sock, select.POLLIN)
                    continue
                sock, said = greeting[descriptor]
                if _more_to_come(sock, said):
                    continue
                poll.unregister(sock)
                del greeting[descriptor]
                key = _child(bytes(said), neighbours.secret)
                if key in missing:
                    missing.remove(key)
                    found[key] = Connection(sock, key[1], hosts[key[1]])
                else:
                    sock.close()
        for sock, _ in greeting.values():
            sock.close()
        return found


def _more_to_come(sock: socket.socket, said: bytearray) -> bool:
    try:
        part = sock.recv(_HELLO.size - len(said))
    except BlockingIOError:
        return True
    except OSError:
        return False
    said += part
    return bool(part) and len(said) < _HELLO.size


def _child(said: bytes, secret: str) -> tuple[int, int]:
    """Tree and rank of one that knows the secret; (-1, -1) for a stranger."""
    if len(said) != _HELLO.size:
        return -1, -1
    theirs, number, rank = _HELLO.unpack(said)
    return (number, rank) if hmac.compare_digest(theirs, bytes.fromhex(secret)) else (-1, -1)


def neighbours_of_all(everybody: Sequence[Where]) -> list[Neighbours]:
    """By rank; `everybody`: by rank."""
    secret = os.urandom(16).hex()
    return [
        Neighbours(
            None if place.parent is None else everybody[place.parent],
            tuple((child, everybody[child].host) for child in place.children),
            secret,
        )
        for place in tree_nodes([where.host for where in everybody])
    ]


def connect_all_ranks(
    store: Any, rank: int, world_size: int, host: str, address: str, trees: int, timeout_s: float
) -> list[Tree]:
    """As many trees over all ranks, which meet at `store`; collective. `address`: where this rank can be reached.

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
        values = [json.dumps(asdict(one)) for one in neighbours_of_all(everybody)]
        store.multi_set([_NEIGHBOURS.format(rank) for rank in range(world_size)], values)
    mine = json.loads(store.get(_NEIGHBOURS.format(rank)))
    parent = None if mine["parent"] is None else Where(**mine["parent"])
    children = tuple((child, name) for child, name in mine["children"])
    return listener.connect(Neighbours(parent, children, mine["secret"]), trees, timeout_s)


def own_address(environment: Mapping[str, str], master: str) -> str:
    """Where other ranks reach this one: at the interface of GLOO_SOCKET_IFNAME, as gloo; else at the address from which
    this host reaches `master`.

    On the host of `master` its name may stand for the loopback's address, which says nothing to other hosts: then it is
    the address from which this host reaches others. Raises ValueError naming the variable if there is none.
    """
    named = environment.get(_INTERFACE, "").split(",")[0].strip()
    if named:
        found = _address_of_interface(named)
        if found is None:
            raise ValueError(
                f"{_INTERFACE} {named}: host {socket.gethostname()} has no interface of that name with an address; "
                "name one that every host has"
            )
        return found
    found = _address_towards((master, 9))
    if found is not None and _is_loopback(found) and not (_is_loopback(master) or master == "localhost"):
        found = _address_towards(_OUTSIDE) or found
    if found is None:
        raise ValueError(
            f"host {socket.gethostname()} reaches no other host, not {master} either: correct MASTER_ADDR, or name its "
            f"interface in {_INTERFACE}"
        )
    return found


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _address_towards(destination: tuple[str, int]) -> str | None:
    """The local address of datagrams to `destination`; none is sent."""
    try:
        candidates = socket.getaddrinfo(*destination, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in candidates:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def _address_of_interface(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", name.encode()[: _IFNAMSIZ - 1])
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return _ipv6_of_interface(name)


def _ipv6_of_interface(name: str) -> str | None:
    """As proc(5) says of if_inet6: address, index, prefix length, scope, flags, name. Scope 0 is global."""
    try:
        with open("/proc/net/if_inet6") as file:
            lines = [line.split() for line in file]
    except OSError:
        return None
    for address, _, _, scope, _, device in lines:
        if device == name and int(scope, 16) == 0:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    return None
