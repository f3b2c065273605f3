"""Where ports listen: at the addresses that a name stands for, and nowhere else."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import psutil
import pytest

from megatron.net import listening
from megatron.net.listening import EVERYWHERE, LOOPBACK, address_for_store, listen_for_hosts, name_here, own_addresses

MINE, OTHER = "127.0.0.77", "198.51.100.77"  # all of 127.0.0.0/8 are of this host; the second one is of none


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names stand for, in place of a name server."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def look_up(name: str, *rest: Any, **options: Any) -> list[Any]:
        return [found for address in known.get(name, [name]) for found in real(address, *rest, **options)]

    monkeypatch.setattr(listening.socket, "getaddrinfo", look_up)
    return known


def test_a_name_stands_for_addresses_of_this_host(names: dict[str, list[str]]) -> None:
    assert own_addresses("127.0.0.1") == ["127.0.0.1"]
    assert own_addresses("localhost")[0] == "127.0.0.1"
    outside = own_addresses("nobody.invalid")  # from which this host reaches others, if it does
    names["debian"] = ["127.0.1.1"]
    assert own_addresses("debian") == [*outside, "127.0.1.1"]
    names["service"] = [OTHER]  # such as a virtual address of Kubernetes
    assert own_addresses("service") == outside
    assert not any(address.startswith("127.") for address in outside)


def test_what_this_host_calls_itself() -> None:
    assert name_here("localhost", "127.0.0.1") == "localhost"
    assert name_here("localhost", MINE) == MINE
    assert name_here("localhost", EVERYWHERE) == "localhost"
    assert name_here("nobody.invalid", EVERYWHERE) == LOOPBACK


def test_without_a_route_to_others_all_interfaces_are_listened_at(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a private network. The stand-in is for a host without a default route."""
    monkeypatch.setattr(listening, "address_towards", lambda _: None)
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    v4 = {one.address for name in up for one in psutil.net_if_addrs()[name] if one.family == socket.AF_INET}
    known = set(own_addresses("private.invalid"))
    assert not any(map(listening.is_loopback, known)) and bool(known) == any(not a.startswith("127.") for a in v4)
    names["debian"] = ["127.0.1.1"]
    assert {*known, "127.0.1.1"} == set(own_addresses("debian"))
    made = listen_for_hosts("debian", 0)
    assert {one.getsockname()[0] for one in made} == {*known, "127.0.1.1", LOOPBACK}
    for one in made:
        one.close()
    assert all(address in caplog.text for address in known) and "--bind" in caplog.text
    monkeypatch.setattr(listening, "_of_interfaces", lambda: [MINE.replace("127", "10"), OTHER])
    assert address_for_store("debian") == EVERYWHERE  # one socket for two networks
    monkeypatch.setattr(listening, "_of_interfaces", lambda: [OTHER])
    assert address_for_store("debian") == OTHER
    assert address_for_store("localhost") == LOOPBACK


def reached(address: str, port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection((address, port), 60):
        return True
    return False


def test_a_port_listens_where_it_is_reached_and_nowhere_else(names: dict[str, list[str]]) -> None:
    for bind, there in ((MINE, {MINE}), (None, {MINE, LOOPBACK}), (EVERYWHERE, {MINE, LOOPBACK, "127.0.0.78"})):
        made = listen_for_hosts(MINE, 0, bind)
        (port,) = {one.getsockname()[1] for one in made}
        assert {address for address in (MINE, LOOPBACK, "127.0.0.78") if reached(address, port)} == there
        for one in made:
            one.close()


def test_a_port_that_is_taken_is_not_listened_on_in_part() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen_for_hosts(MINE, port)
        with socket.create_server((MINE, port)):
            pass
