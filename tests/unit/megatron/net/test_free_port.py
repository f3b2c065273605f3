"""Ports for a launch's rendezvous."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from megatron.net import free_port as module
from megatron.net.free_port import free_port


def test_no_port_that_a_connection_could_take() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = {free_port() for _ in range(50)}
    assert not [port for port in found if low <= port <= high]
    assert len(found) > 40  # launches that begin together hardly ever get the same


@pytest.mark.parametrize("text", ["1024 65535\n", "20000 60999\n"])
def test_a_host_whose_connections_take_low_ports(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(module, "_EPHEMERAL_RANGE", tmp_path / "range")
    assert free_port() > 0


def test_a_port_in_use_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("", 0))
        listening.listen()
        port = int(listening.getsockname()[1])
        (tmp_path / "range").write_text(f"{port + 1} 65535\n")
        monkeypatch.setattr(module, "_EPHEMERAL_RANGE", tmp_path / "range")
        monkeypatch.setattr(module, "_FIRST", port)
        assert free_port() != port
