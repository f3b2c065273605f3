"""Host names from files alone, for a while."""

from __future__ import annotations

import socket

from megatron.net.name_lookups import names_from_files, numeric_address


def test_names_come_from_files_meanwhile() -> None:
    """An address for documentation (RFC 5737) is in no /etc/hosts, so it is its own name, and that is no error."""
    with names_from_files():
        assert socket.getnameinfo(("::ffff:192.0.2.7", 80, 0, 0), socket.NI_NUMERICSERV)[0] == "::ffff:192.0.2.7"
        assert socket.gethostbyname("localhost") == "127.0.0.1"
    assert socket.gethostbyname("localhost") == "127.0.0.1"


def test_numeric_address() -> None:
    assert numeric_address("127.0.0.1") == "127.0.0.1"
    assert numeric_address("::1") == "::1"
    assert numeric_address("localhost") == "127.0.0.1"


def test_unknown_host_has_none() -> None:
    with names_from_files():
        assert numeric_address("somewhere.invalid") is None
