"""Strangers speak to every port of a launch, found by the launch's own sockets: it goes on, and nothing grows.

STRANGERS: how many connections are made (default: few enough for each run of the suite). With more, `pytest -s` shows
the figures of docs/security.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from megatron.net.acceptor import MOST
from megatron.net.handshake import AGREEMENT, COORDINATOR, COPIES, MAGIC, AuthenticationError, connect
from tests.dist.harness import end_all
from tests.unit.certificates import make_files
from tests.unit.megatron.launch.test_launch import until
from tests.unit.megatron.launch.test_nodes import NEVER_SILENT, Nodes
from tests.unit.trace_helpers import SECRET

pytestmark = pytest.mark.slow
CONNECTIONS = int(os.environ.get("STRANGERS", "240"))
HALF_OPEN = 300  # at once, over all ports
CROWD = MOST + 44  # silent ones at one port: more than there is room for
GROWTH = 64 << 20  # bytes of a process: what its own work may take
WAIT_S = 300.0
# Ports that torch serves: it authenticates nobody (docs/security.md).
OF_TORCH = {"rendezvous"}

# Four ranks that connect for their agreements. The last one waits, so that rank 0 listens meanwhile.
RANK = """
import pathlib
from megatron.parallel.connecting import connect_all_ranks
from tests.unit.megatron.launch.test_strangers import FileStore
class Waits(FileStore):
    def get(self, key):
        found = super().get(key)
        if rank == 3:
            note("all_but_one")
            while not pathlib.Path("go").exists():
                time.sleep(0.02)
        return found
secret = os.environ["MEGATRON_LAUNCH_SECRET"].encode()
(tree,) = connect_all_ranks(Waits(pathlib.Path(f"store_{restart}")), rank, 4, "h", "127.0.0.1", 1, 300.0, secret)
assert tree.up(b"%d" % rank) == ([(r, b"%d" % r) for r in range(4)] if rank == 0 else None)
assert tree.down(b"all") == b"all"
note(f"agreed_{restart}_{rank}")
"""


class FileStore:
    """What connect_all_ranks needs of a store, in a directory that all ranks share, without a port."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory

    def _path(self, key: str) -> Path:
        return self._directory / key.replace("/", "_")

    def append(self, key: str, value: str) -> None:
        with self._path(key).open("a") as file:
            file.write(value)  # less than a page: at once

    def add(self, key: str, _: int) -> int:
        number = 1
        while True:
            with contextlib.suppress(FileExistsError), self._path(f"{key}_{number}").open("x"):
                return number
            number += 1

    def set(self, key: str, value: str) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            temporary = self._path(f"{key}.tmp")
            temporary.write_text(value)
            temporary.rename(self._path(key))

    def wait(self, keys: list[str]) -> None:
        until(lambda: all(self._path(key).exists() for key in keys), f"{keys}")

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._path(key).read_bytes()


class Port(NamedTuple):
    """Where a process of the launch listens."""

    process: str
    address: str
    number: int

    @property
    def where(self) -> tuple[str, int]:
        return self.address, self.number

    @property
    def purpose(self) -> bytes:
        return {"coordinator": COORDINATOR, "memory-copies": COPIES}.get(self.process, AGREEMENT)

    def secret(self, nodes: Nodes) -> bytes:
        """What proves at this port that one belongs to the launch: ranks also have a secret of their start."""
        if self.purpose != AGREEMENT:
            return SECRET.encode()
        told = json.loads(FileStore(nodes.directory / "store_0").get("tree/neighbours/0"))
        return SECRET.encode() + bytes.fromhex(told["secret"])


def listening(nodes: Nodes) -> list[Port]:
    """Every port of the launch, by the sockets of its processes."""
    found: dict[tuple[str, int], set[str]] = {}
    for process in nodes.left():
        with contextlib.suppress(psutil.Error):
            name = "coordinator" if "coordinate" in process.cmdline() else process.name()
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.setdefault((one.laddr.ip, one.laddr.port), set()).add(name)
    # A process that an agent forked has inherited what the agent listens on.
    known = ("coordinator", "memory-copies", *OF_TORCH)
    return [Port(next((one for one in known if one in names), "rank"), *where) for where, names in found.items()]


def recorded(port: Port, nodes: Nodes) -> bytes:
    """What a client says that knows the secret."""
    said: list[bytes] = []

    class Recording(socket.socket):
        def sendall(self, data: bytes, *flags: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            said.append(bytes(data))
            super().sendall(data, *flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", Recording)
        connect(port.where, port.secret(nodes), port.purpose, WAIT_S).close()
    return b"".join(said)


class Strangers:
    """All that are connected at a time; `half_open` say nothing, or not enough."""

    def __init__(self, generator: random.Random, replayed: dict[Port, bytes]) -> None:
        self._generator = generator
        self._replayed = replayed
        self.half_open: list[socket.socket] = []
        self.kinds: Counter[str] = Counter()
        self.sent = 0

    def speak(self, port: Port) -> None:
        kinds: list[Callable[[Port], bytes | None]] = [
            self._random, self._truncated, self._half_open, self._unproved, self._long, self._replay, self._mistaken,
        ]  # fmt: skip
        kind = self._generator.choice(kinds)
        self.kinds[kind.__name__.removeprefix("_")] += 1
        with contextlib.suppress(ConnectionError, TimeoutError):
            said = kind(port)
            if said is not None:
                with socket.create_connection(port.where, WAIT_S) as one:
                    self.sent += len(said)
                    one.sendall(said)

    def _random(self, _: Port) -> bytes:
        return self._generator.randbytes(self._generator.randrange(5000))

    def _truncated(self, _: Port) -> bytes:
        return (MAGIC + self._generator.randbytes(32))[: self._generator.randrange(40)]

    def _unproved(self, _: Port) -> bytes:
        return MAGIC + self._generator.randbytes(32 + self._generator.randrange(2000))

    def _long(self, _: Port) -> bytes:
        """Announces more than any process has: an object, or a payload."""
        return struct.pack("<IQ", *self._generator.choice((((1 << 32) - 1, 0), (2, 1 << 62)))) + bytes(1 << 20)

    def _replay(self, port: Port) -> bytes:
        return self._replayed[port]

    def _half_open(self, port: Port) -> None:
        one = socket.create_connection(port.where, WAIT_S)
        one.sendall(MAGIC[: self._generator.randrange(8)])
        self.half_open.append(one)
        if len(self.half_open) > HALF_OPEN:
            self.half_open.pop(0).close()

    def _mistaken(self, port: Port) -> None:
        with pytest.raises((AuthenticationError, ConnectionError)):
            connect(port.where, b"x" * 32, port.purpose, WAIT_S).close()

    def crowd(self, port: Port) -> list[socket.socket]:
        self.kinds["crowd"] += CROWD
        return [socket.create_connection(port.where, WAIT_S) for _ in range(CROWD)]

    def close(self) -> None:
        for one in self.half_open:
            one.close()


@pytest.fixture(params=["plain", "tls"])
def launched(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Two nodes whose ranks wait for the last one to connect."""
    nodes = Nodes(tmp_path, RANK)
    nodes.arguments = ["--checkpoint-engine", "memory"]
    tls: list[str] = []
    if request.param == "tls":
        files = make_files(tmp_path / "tls")
        tls = files.flags
        for variable, path in files.variables.items():  # of this process, which has to be let in, too
            monkeypatch.setenv(variable, path)
    nodes.coordinate("--nnodes", "2", "--max-restarts", "1", "--heartbeat-timeout", NEVER_SILENT, *tls)
    for number in (0, 1):
        nodes.agent(number, *tls)
    until((tmp_path / "all_but_one").exists, nodes.said())
    yield nodes
    end_all(nodes.left)
    for started in nodes.started:
        started.wait(WAIT_S)


def resident(nodes: Nodes) -> dict[int, int]:
    return {process.pid: process.memory_info().rss for process in nodes.left()}


def descriptors(nodes: Nodes) -> dict[int, int]:
    return {process.pid: process.num_fds() for process in nodes.left()}


def test_no_stranger_stops_a_launch(launched: Nodes) -> None:
    nodes = launched
    ranks = [json.loads(line) for line in FileStore(nodes.directory / "store_0").get("tree/where").splitlines()]
    held = [where["port"] for where in ranks if where["rank"] == 3]  # it answers when it goes on
    ports = [port for port in listening(nodes) if port.process not in OF_TORCH and port.number not in held]
    assert {port.process for port in ports} == {"coordinator", "memory-copies", "rank"} and len(ports) >= 4, ports
    assert not [port for port in ports if port.address in ("0.0.0.0", "::")], "each listens where it is needed"
    before, fds = resident(nodes), descriptors(nodes)
    strangers = Strangers(random.Random(14), {port: recorded(port, nodes) for port in ports})
    honest_s: list[float] = []
    most = 0
    for number in range(CONNECTIONS):
        strangers.speak(ports[number % len(ports)])
        if number % 20 == 19:  # one of the launch comes, too
            began = time.monotonic()
            port = ports[number // 20 % len(ports)]
            connect(port.where, port.secret(nodes), port.purpose, WAIT_S).close()
            honest_s.append(time.monotonic() - began)
            most = max(most, *(after - fds.get(pid, 0) for pid, after in descriptors(nodes).items()))
    after = resident(nodes)
    assert after.keys() == before.keys(), "no process has ended, none was started"
    growth = {pid: after[pid] - before[pid] for pid in before}
    assert max(growth.values()) < GROWTH
    for port in ports:
        crowd = strangers.crowd(port)
        connect(port.where, port.secret(nodes), port.purpose, WAIT_S).close()
        for one in crowd:
            one.close()
    (nodes.directory / "go").touch()
    coordinator, *agents = nodes.started
    assert [process.wait(WAIT_S) for process in (coordinator, *agents)] == [0, 0, 0], nodes.said()
    strangers.close()
    said = nodes.said() + nodes.said("agent0") + nodes.said("agent1")
    assert "Traceback" not in said and "restart" not in said and SECRET not in said
    figures = {
        "ports": len(ports), "connections": sum(strangers.kinds.values()), "kinds": dict(strangers.kinds),
        "bytes": strangers.sent, "growth_bytes": max(growth.values()), "descriptors": most,
        "honest": len(honest_s), "honest_max_s": round(max(honest_s), 3),
    }  # fmt: skip
    print(json.dumps(figures))
