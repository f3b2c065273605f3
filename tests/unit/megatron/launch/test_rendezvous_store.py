"""The process that serves a launch's rendezvous, with torch's own clients."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  it is documented

from tests.unit.trace_helpers import ROOT

# A fork wants a process of one thread, which pytest's is not.
SERVER = """
import sys
from megatron.launch.rendezvous_store import RendezvousStore
store = RendezvousStore(sys.argv[1], int(sys.argv[2])).serve()
print(store.port, flush=True)
sys.stdin.readline()
store.close()
print(RendezvousStore(sys.argv[1], store.port).serve().port)
"""


@contextlib.contextmanager
def served(address: str, port: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, address, str(port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert server.stdout is not None
    try:
        yield server, int(server.stdout.readline())
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_clients_meet_there(address: str) -> None:
    with served(address, 0) as (_, port):
        first, second = (
            TCPStore(address, port, 2, False, timedelta(minutes=5), wait_for_workers=False) for _ in range(2)
        )
        first.set("key", "value")
        assert second.get("key") == b"value"


def test_it_is_closed_to_other_hosts_where_all_ranks_are_here() -> None:
    with served("127.0.0.1", 0) as (server, port):
        # The port listens before the process has its name: a client that was served comes after both.
        client = TCPStore("127.0.0.1", port, 1, False, timedelta(minutes=5), wait_for_workers=False)
        client.set("key", "value")
        child = psutil.Process(server.pid).children()[0]
        assert child.name() == "rendezvous"
        listening = [c.laddr.ip for c in child.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert listening == ["127.0.0.1"]


@pytest.mark.slow
def test_its_port_is_free_again_once_it_is_closed() -> None:
    with served("127.0.0.1", 0) as (server, port):
        client = TCPStore("127.0.0.1", port, 1, False, timedelta(minutes=5), wait_for_workers=False)
        client.set("key", "value")
        assert server.communicate("\n")[0] == f"{port}\n"


def test_it_ends_with_its_launcher() -> None:
    with served("127.0.0.1", 0) as (server, port):
        child = psutil.Process(server.pid).children()[0]
        server.kill()
        child.wait(300)
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), 5)
