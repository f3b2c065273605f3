"""Where a port of a launch listens: at the addresses by which its other parts reach this host, and at no others."""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import socket
import struct
from collections.abc import Sequence

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
EVERYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
_BACKLOG = 4096  # the kernel caps it (net.core.somaxconn)
_OUTSIDE = ("192.0.2.1", 9)  # of no network (RFC 5737); nothing is sent there
_TRIES = 16
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_IFF_UP = 1  # linux/if.h
_IFNAMSIZ = 16


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
    own = [bind] if bind is not None else _told_addresses(name, towards)[0]
    addresses = list(dict.fromkeys([*own, LOOPBACK]))
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
    has it, the first is that from which this host reaches `towards`, or else other networks. Without a route to either,
    they are those of all interfaces that are up.
    """
    return _found_own(name, towards)[0]


def address_for_store(name: str, towards: str | None = None) -> str:
    """Where a server listens that takes one socket: at the first of `own_addresses`, or the loopback if there is none.

    Where these are the addresses of all interfaces, and several, it is EVERYWHERE.
    """
    found, guessed = _told_addresses(name, towards)
    if guessed and len([address for address in found if not is_loopback(address)]) > 1:
        return EVERYWHERE
    return [*found, LOOPBACK][0]


def _found_own(name: str, towards: str | None) -> tuple[list[str], bool]:
    """`own_addresses`, and whether they are those of all interfaces."""
    found = [address for address in _addresses(name) if _is_own(address)]
    if name == "localhost" or is_loopback(name) or not all(map(is_loopback, found)):
        return found, False
    routed = [address_towards((towards, 9)) if towards is not None else None, address_towards(_OUTSIDE)]
    others = [address for address in routed if address is not None and not is_loopback(address)][:1]
    return (others or _of_interfaces()) + found, not others


def _told_addresses(name: str, towards: str | None) -> tuple[list[str], bool]:
    """As `_found_own`, with a warning."""
    found, guessed = _found_own(name, towards)
    if guessed:
        _warn(name, tuple(address for address in found if not is_loopback(address)))
    return found, guessed


@functools.cache  # once in a process
def _warn(name: str, addresses: tuple[str, ...]) -> None:
    logger.warning(
        "%s stands for no address of this host by which others reach it, and no route leads from here to others: "
        "listening at %s; correct the name, or give --bind ADDRESS",
        name,
        ", ".join(addresses) or f"{LOOPBACK} alone, since no other interface is up",
    )


def name_here(name: str, address: str) -> str:
    """By what this host itself reaches what listens at `address`, and other hosts reach as `name`."""
    known = _addresses(name)
    if address in (EVERYWHERE, "0.0.0.0", "::"):
        return name if known else LOOPBACK
    return name if address in known else address


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


def address_of_interface(name: str) -> str | None:
    """Its IPv4 address, or else its global IPv6 address; None if it has neither, or there is no such interface."""
    found = _ask_interface(name, _SIOCGIFADDR)
    return _ipv6_of_interface(name) if found is None else socket.inet_ntoa(found[20:24])


def _of_interfaces() -> list[str]:
    """The addresses of all interfaces that are up, IPv4 first, without the loopback's."""
    up: list[str] = []
    for _, name in socket.if_nameindex():
        flags = _ask_interface(name, _SIOCGIFFLAGS)
        if flags is not None and struct.unpack_from("h", flags, _IFNAMSIZ)[0] & _IFF_UP:
            up.append(name)
    both = [*map(address_of_interface, up), *map(_ipv6_of_interface, up)]
    return list(dict.fromkeys(address for address in both if address is not None and not is_loopback(address)))


def _ask_interface(name: str, request: int) -> bytes | None:
    """The struct ifreq of netdevice(7) after an ioctl; None if the interface has no answer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return fcntl.ioctl(probe, request, struct.pack("256s", name.encode()[: _IFNAMSIZ - 1]))
        except OSError:
            return None


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
