"""Where a port of a launch listens: at the addresses by which its other parts reach this host, and at no others."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
EVERYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
_BACKLOG = 4096  # the kernel caps it (net.core.somaxconn)
_OUTSIDE = ("192.0.2.1", 9)  # of no network (RFC 5737); nothing is sent there
_TRIES = 16


def listen_on(address: str, port: int) -> socket.socket:
    """A socket for connections to `address`, one of this host or EVERYWHERE; port 0: a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    both = address == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def listen_for_hosts(name: str, port: int, bind: str | None = None, towards: str | None = None) -> list[socket.socket]:
    """Sockets at one port of the loopback and of all `own_addresses`; `bind`: at that address instead of these.

    Raises OSError.
    """
    if bind is not None and (bind in (EVERYWHERE, "0.0.0.0", "::") or is_loopback(bind)):
        return [listen_on(bind, port)]
    addresses = list(dict.fromkeys([*([bind] if bind is not None else own_addresses(name, towards)), LOOPBACK]))
    for left in reversed(range(_TRIES)):
        try:
            return _at_one_port(addresses, port)
        except OSError as error:  # the port that is free at one address may be taken at another
            if port or not left or error.errno != errno.EADDRINUSE:
                raise
    raise AssertionError("the last try returns or raises")


def _at_one_port(addresses: Sequence[str], port: int) -> list[socket.socket]:
    made: list[socket.socket] = []
    try:
        for address in addresses:
            made.append(listen_on(address, port))
            port = int(made[0].getsockname()[1])
    except OSError:
        for one in made:
            one.close()
        raise
    return made


def own_addresses(name: str, towards: str | None = None) -> list[str]:
    """The addresses of this host by which others reach it that know it as `name`, the first one best. May be empty.

    They are those that `name` stands for. Where it stands for none, or for loopback addresses as Debian's /etc/hosts
    has it, the first is that from which this host reaches `towards`, or else other networks.
    """
    found = [address for address in _addresses(name) if _is_own(address)]
    if name != "localhost" and not is_loopback(name) and all(map(is_loopback, found)):
        others = [address_towards((towards, 9)) if towards is not None else None, address_towards(_OUTSIDE)]
        found = [address for address in others if address is not None and not is_loopback(address)][:1] + found
    return found


def name_here(name: str, address: str) -> str:
    """By what this host itself reaches what listens at `address`, and other hosts reach as `name`."""
    return name if address in (EVERYWHERE, "0.0.0.0", "::") or address in _addresses(name) else address


def is_loopback(address: str) -> bool:
    """Whether this is a loopback address."""
    return address.startswith("127.") or address == "::1"


def address_towards(destination: tuple[str, int]) -> str | None:
    """The local address of datagrams to `destination`; none is sent."""
    try:
        candidates = socket.getaddrinfo(*destination, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in candidates:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def _addresses(name: str) -> list[str]:
    """What a name or an address stands for on this host, IPv4 first; without those that are valid on one link alone."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return list(dict.fromkeys(str(one[4][0]) for one in found if not str(one[4][0]).lower().startswith("fe80")))


def _is_own(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
