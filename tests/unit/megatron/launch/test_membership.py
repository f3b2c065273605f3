"""Coordinators that elect their leader in a real etcd; all are processes of this host."""

from __future__ import annotations

import base64
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from megatron.launch import etcd as etcd_client
from megatron.launch.cli import parse_arguments, parse_coordinator_arguments
from megatron.launch.etcd import Etcd, StoreAddress, parse_address
from megatron.launch.membership import Leadership
from megatron.net.free_port import free_port
from restart_trace.cycles import LAUNCH_ID_VARIABLE
from tests.dist.harness import runs
from tests.unit.megatron.launch.test_launch import until
from tests.unit.megatron.launch.test_nodes import NEVER_SILENT, SILENT, Nodes, labels, nodes

pytestmark = pytest.mark.slow  # each starts agents and their ranks
__all__ = ["nodes"]  # a fixture
NAME = "job7"
MANY = "100"  # restarts: a slow machine may take a node for lost with a short heartbeat timeout


class EtcdServer:
    """A cluster of one member, with its data in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.port, peer = free_port(), free_port()
        self.address = f"etcd://127.0.0.1:{self.port}/{NAME}"
        self.url, between = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{peer}"
        self._log = directory / "etcd.log"
        self._command = [
            "etcd", "--name", "one", "--data-dir", str(directory / "etcd"), "--listen-client-urls", self.url,
            "--advertise-client-urls", self.url, "--listen-peer-urls", between, "--initial-advertise-peer-urls",
            between, "--initial-cluster", f"one={between}", "--unsafe-no-fsync",
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        until(lambda: self.process.poll() is not None or self._healthy(), f"etcd; its log is {self._log}")
        assert self.process.poll() is None, self._log.read_text()[-2000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(300)

    def has(self, key: str) -> bool:
        return "kvs" in self._ask("range", key=f"restart-launch/{NAME}/{key}")

    def delete(self, prefix: str) -> None:
        """As `etcdctl del --prefix`."""
        found = self._ask("deleterange", key=prefix, range_end=prefix[:-1] + chr(ord(prefix[-1]) + 1))
        assert found["deleted"] != "0"

    def _ask(self, call: str, **fields: str) -> dict[str, Any]:
        body = json.dumps({name: base64.b64encode(text.encode()).decode() for name, text in fields.items()}).encode()
        with urlopen(Request(f"{self.url}/v3/kv/{call}", body), timeout=300) as answer:
            return json.load(answer)

    def _healthy(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=300) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (apt-get install etcd-server)")
    server = EtcdServer(tmp_path)
    yield server
    server.kill()


class Launch:
    """A launch of two nodes, by its coordinators and agents."""

    def __init__(self, nodes: Nodes, address: str, *options: str, heartbeat: str = NEVER_SILENT) -> None:
        self.nodes = nodes
        self._address = address
        self._options = ("--nnodes", "2", "--heartbeat-timeout", heartbeat, "--membership", address, *options)

    def coordinator(self, name: str, *more: str, **variables: str) -> subprocess.Popen[bytes]:
        """It leads, or waits as a standby; `name` is that of its log."""
        return self.nodes.coordinate("--address", "127.0.0.1", *self._options, *more, name=name, **variables)

    def standby(self) -> subprocess.Popen[bytes]:
        process = self.coordinator("standby")
        self.until_said("standby", "waits as a standby: the coordinator of")
        return process

    def agents(self, *numbers: int) -> list[subprocess.Popen[bytes]]:
        return [self.nodes.agent(number, where=self._address) for number in numbers]

    def until_said(self, name: str, text: str, times: int = 1) -> None:
        until(lambda: self.nodes.said(name).count(text) >= times, f"{text!r} of {name}: {self.nodes.said(name)}")

    def until_restarted_by(self, name: str) -> None:
        """All ranks run that this coordinator has started last."""

        def run() -> bool:
            numbers = re.findall(r"starting all ranks again: restart (\d+)", self.nodes.said(name))
            started = [self.nodes.directory / f"start_{number}_{rank}" for number in numbers[-1:] for rank in range(4)]
            return bool(started) and all(path.exists() for path in started)

        until(run, f"ranks that {name} starts: {self.nodes.said(name)}")

    def ends(self, *processes: subprocess.Popen[bytes]) -> list[int]:
        codes = [process.wait(300) for process in processes]
        self.nodes.until_gone()
        return codes


SPARE = "node 2 (127.0.0.1) has joined as a spare"
WAITS = "all nodes are there; their ranks start once etcd at "
UNREACHABLE = "etcd does not answer; ranks go on, and none start again until it does: "


def test_an_endpoint_that_stood_still_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at a start, which ends where etcd is away."""
    monkeypatch.setattr(etcd_client, "_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with listening.accept()[0]:  # which gets no answer
                monkeypatch.setattr(etcd_client, "_TIMEOUT_S", 300.0)
                with listening.accept()[0] as second:
                    second.recv(1 << 16)
                    second.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                    second.shutdown(socket.SHUT_WR)
                    while second.recv(1 << 16):
                        pass

        threading.Thread(target=serve, daemon=True).start()
        address = StoreAddress((("127.0.0.1", listening.getsockname()[1]),), NAME)
        assert Etcd(address).get("coordinator") is None


def test_the_end_is_recorded_though_the_host_stood_still(
    etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The thread that records it stood still, too. Standbys would go on otherwise."""
    address = parse_address(etcd.address)
    leading = Leadership(address, ("127.0.0.1", 1), 20.0, "one", "digest")
    leading.campaign()
    real, waits = leading._thread.join, iter([lambda: None])  # the first is over, and the thread has had no time
    monkeypatch.setattr(leading._thread, "join", lambda _: next(waits, lambda: real(300))())
    leading.end(0, "one")
    assert etcd.has("ended") and "could not be recorded" not in capsys.readouterr().err


def test_a_standby_coordinator_takes_over_when_the_leader_is_lost(nodes: Nodes, etcd: EtcdServer) -> None:
    """All ranks start again, each node in its place; the spare stays one."""
    launch = Launch(nodes, etcd.address, "--spares", "1", "--max-restarts", "1", heartbeat=SILENT)
    first = launch.coordinator("coordinator")
    agents = launch.agents(1, 2, 0)
    before = nodes.ranks(0)
    launch.until_said("coordinator", SPARE)
    second = launch.standby()
    first.kill()
    after = nodes.ranks(1)
    assert not [pid for pid, _ in before if runs(pid)]
    places = [[(variables["GROUP_RANK"], variables["LABEL"]) for _, variables in ranks] for ranks in (before, after)]
    assert places[0] == places[1] == [("0", "node0")] * 2 + [("1", "node1")] * 2
    assert "takes over from the coordinator of" in nodes.said("standby")
    launch.until_said("standby", SPARE)  # it may come back later than the ranks start
    nodes.finish()
    assert launch.ends(second, *agents) == [0, 0, 0, 0], nodes.said("standby")


def test_a_host_that_ran_the_coordinator_and_ranks_is_lost(nodes: Nodes, etcd: EtcdServer) -> None:
    """A spare takes its place under the coordinator that takes over, which is itself lost later."""
    launch = Launch(nodes, etcd.address, "--spares", "1", "--max-restarts", MANY, heartbeat="4")
    first = launch.coordinator("coordinator")
    agents = launch.agents(0, 1, 2)
    nodes.ranks(0)
    launch.until_said("coordinator", SPARE)
    second = launch.standby()
    first.kill()
    agents[0].kill()
    launch.until_said("standby", "node 2 (127.0.0.1) takes the place of node rank 0")
    launch.until_restarted_by("standby")
    third = launch.coordinator("third")
    launch.until_said("third", "waits as a standby")
    second.kill()
    launch.until_restarted_by("third")
    nodes.finish()
    assert launch.ends(third, *agents) == [0, -signal.SIGKILL, 0, 0], nodes.said("third")
    assert "takes the place" not in nodes.said("third")


def test_a_leader_that_is_lost_before_ranks_start(nodes: Nodes, etcd: EtcdServer) -> None:
    """A node that it has let in is let in by the other one, too."""
    launch = Launch(nodes, etcd.address, "--spares", "1", heartbeat=SILENT)
    first = launch.coordinator("coordinator")
    agents = launch.agents(2)
    launch.until_said("coordinator", SPARE)
    second = launch.standby()
    first.kill()
    agents += launch.agents(0, 1)
    assert labels(nodes.ranks(0)) == ["node0", "node0", "node1", "node1"]
    launch.until_said("standby", SPARE)
    nodes.finish()
    assert launch.ends(second, *agents) == [0, 0, 0, 0], nodes.said("standby")


def test_a_coordinator_that_is_started_again_goes_on(nodes: Nodes, etcd: EtcdServer) -> None:
    """By whatever supervises it. One of the endpoints does not answer."""
    closed = free_port()
    both = f"etcd://127.0.0.1:{closed},127.0.0.1:{etcd.port}/{NAME}"
    launch = Launch(nodes, both, "--max-restarts", MANY, heartbeat="4")
    first = launch.coordinator("coordinator")
    agents = launch.agents(0, 1)
    nodes.ranks(0)
    first.kill()
    again = launch.coordinator("again")
    launch.until_restarted_by("again")
    nodes.finish()
    assert launch.ends(again, *agents) == [0, 0, 0], nodes.said("again")


def test_the_end_of_a_launch_is_that_of_its_standby_coordinators_and_the_name_can_be_used_again(
    nodes: Nodes, etcd: EtcdServer
) -> None:
    launch = Launch(nodes, etcd.address, "--max-restarts", "1")
    first = launch.coordinator("coordinator", **{LAUNCH_ID_VARIABLE: "one"})
    agents = launch.agents(0, 1)
    second = launch.standby()
    nodes.ranks(0)
    nodes.end_rank(0, 0, 3)
    nodes.ranks(1)
    nodes.end_rank(1, 0, 3)
    assert launch.ends(first, second, *agents) == [1, 1, 1, 1], nodes.said()
    assert "the launch has ended with exit status 1" in nodes.said("standby")
    late = launch.coordinator("late", **{LAUNCH_ID_VARIABLE: "one"})  # a standby of that launch
    assert late.wait(300) == 1 and "the launch has ended with exit status 1" in nodes.said("late")
    for left in nodes.directory.glob("*_?_?"):
        left.unlink()
    agents = launch.agents(0, 1)
    launch.until_said("agent0", "waits for a coordinator of")
    third = launch.coordinator("third")
    nodes.ranks(0)
    nodes.finish()
    assert launch.ends(third, *agents) == [0, 0, 0], nodes.said("third")


def test_without_a_restart_left_the_launch_ends_with_its_coordinator(nodes: Nodes, etcd: EtcdServer) -> None:
    launch = Launch(nodes, etcd.address, heartbeat=SILENT)
    first = launch.coordinator("coordinator")
    agents = launch.agents(0, 1)
    nodes.ranks(0)
    second = launch.standby()
    first.kill()
    assert launch.ends(second, *agents) == [1, 1, 1]
    assert "error: the ranks ended with their coordinator, and no restart of 0 is left" in nodes.said("standby")


@pytest.mark.parametrize("ended", [False, True])
def test_a_leader_that_was_stopped_and_replaced_ends(nodes: Nodes, etcd: EtcdServer, *, ended: bool) -> None:
    """Also if the launch has `ended` under the other one, so that nobody leads when it looks."""
    launch = Launch(nodes, etcd.address, "--max-restarts", MANY, heartbeat="4")
    first = launch.coordinator("coordinator")
    agents = launch.agents(0, 1)
    nodes.ranks(0)
    second = launch.standby()
    first.send_signal(signal.SIGSTOP)
    launch.until_restarted_by("standby")
    if ended:
        nodes.finish()
        assert [process.wait(300) for process in (second, *agents)] == [0, 0, 0], nodes.said("standby")
    first.send_signal(signal.SIGCONT)
    assert first.wait(300) == 1
    assert "coordinates this launch now; this coordinator ends" in nodes.said()
    nodes.finish()
    assert launch.ends(second, *agents) == [0, 0, 0], nodes.said("standby")
    assert etcd.has("ended") and not etcd.has("coordinator")


# Passes connections on to the port that is given, and prints its own.
FORWARD = """
import socket, sys, threading
def copy(source, target):
    while got := source.recv(65536):
        target.sendall(got)
    target.shutdown(socket.SHUT_WR)
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
while True:
    client, server = listening.accept()[0], socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    for ends in ((client, server), (server, client)):
        threading.Thread(target=copy, args=ends, daemon=True).start()
"""


def test_a_leader_that_is_cut_off_from_etcd_keeps_its_ranks_until_it_finds_another_one(
    nodes: Nodes, etcd: EtcdServer
) -> None:
    link = subprocess.Popen([sys.executable, "-c", FORWARD, str(etcd.port)], stdout=subprocess.PIPE)
    try:
        assert link.stdout is not None
        through = f"etcd://127.0.0.1:{int(link.stdout.readline())}/{NAME}"
        options = ("--max-restarts", MANY)
        first = Launch(nodes, through, *options, heartbeat=SILENT).coordinator("coordinator")
        launch = Launch(nodes, etcd.address, *options, heartbeat=SILENT)
        agents = launch.agents(0, 1)
        before = nodes.ranks(0)
        second = launch.standby()
        link.send_signal(signal.SIGSTOP)
        launch.until_said("coordinator", UNREACHABLE)
        launch.until_said("standby", "takes over from the coordinator of")
        # On a slow machine a node may be lost; the coordinator hears of it later than its ranks end.
        until(lambda: all(runs(pid) for pid, _ in before) or "lost" in nodes.said(), nodes.said())
        nodes.end_rank(0, 0, 1)
        launch.until_said("coordinator", WAITS)
        link.send_signal(signal.SIGCONT)
        launch.until_restarted_by("standby")
        assert first.wait(300) == 1
        assert "coordinates this launch now; this coordinator ends" in nodes.said()
        assert "starting all ranks again" not in nodes.said()
        nodes.finish()
        assert launch.ends(second, *agents) == [0, 0, 0], nodes.said("standby")
    finally:
        link.kill()
        link.wait(300)


def test_ranks_go_on_while_etcd_does_not_answer_and_none_start_until_it_does(nodes: Nodes, etcd: EtcdServer) -> None:
    launch = Launch(nodes, etcd.address, "--max-restarts", "1")
    first = launch.coordinator("coordinator")
    agents = launch.agents(0, 1)
    before = nodes.ranks(0)
    etcd.process.send_signal(signal.SIGSTOP)
    launch.until_said("coordinator", UNREACHABLE)
    assert all(runs(pid) for pid, _ in before)
    nodes.end_rank(0, 3, 1)
    launch.until_said("coordinator", WAITS)
    assert not any(runs(pid) for pid, _ in before)
    assert not list(nodes.directory.glob("start_1_*"))
    etcd.process.send_signal(signal.SIGCONT)
    nodes.ranks(1)
    nodes.finish()
    assert launch.ends(first, *agents) == [0, 0, 0], nodes.said()
    assert nodes.said().count(UNREACHABLE) == 1 and f"etcd at {etcd.address} answers again" in nodes.said()


def test_a_node_that_was_cut_off_comes_back_while_etcd_does_not_answer(nodes: Nodes, etcd: EtcdServer) -> None:
    launch = Launch(nodes, etcd.address, "--spares", "1", "--max-restarts", MANY, heartbeat="4")
    first = launch.coordinator("coordinator")
    agents = launch.agents(0, 1, 2)
    nodes.ranks(0)
    launch.until_said("coordinator", SPARE)
    etcd.process.send_signal(signal.SIGSTOP)
    agents[2].send_signal(signal.SIGSTOP)
    launch.until_said("coordinator", "node 2 (127.0.0.1) is lost: no heartbeat for 4 s")
    agents[2].send_signal(signal.SIGCONT)
    launch.until_said("coordinator", SPARE, times=2)
    etcd.process.send_signal(signal.SIGCONT)
    nodes.finish()
    assert launch.ends(first, *agents) == [0, 0, 0, 0], nodes.said()


def test_etcd_that_is_lost_and_started_again_with_its_data(nodes: Nodes, etcd: EtcdServer) -> None:
    launch = Launch(nodes, etcd.address, "--max-restarts", "2", heartbeat=SILENT)
    first = launch.coordinator("coordinator")
    agents = launch.agents(0, 1)
    nodes.ranks(0)
    second = launch.standby()
    etcd.kill()
    launch.until_said("coordinator", UNREACHABLE)
    launch.until_said("standby", "waits as a standby until etcd answers")
    etcd.start()
    launch.until_said("coordinator", "answers again")
    nodes.end_rank(0, 0, 1)
    nodes.ranks(1)
    first.kill()
    nodes.ranks(2)
    nodes.finish()
    assert launch.ends(second, *agents) == [0, 0, 0], nodes.said("standby")


def test_a_training_that_has_lost_etcd_runs_to_its_end(nodes: Nodes, etcd: EtcdServer) -> None:
    launch = Launch(nodes, etcd.address)
    first = launch.coordinator("coordinator")
    agents = launch.agents(0, 1)
    nodes.ranks(0)
    etcd.kill()
    launch.until_said("coordinator", UNREACHABLE)
    nodes.finish()
    assert launch.ends(first, *agents) == [0, 0, 0], nodes.said()
    assert "the end of the launch (exit status 0) could not be recorded; end its standby coordinators" in nodes.said()


def test_a_restart_waits_for_etcd_only_for_a_time(nodes: Nodes, etcd: EtcdServer) -> None:
    launch = Launch(nodes, etcd.address, "--max-restarts", "1", "--join-timeout", "15")
    agents = launch.agents(0, 1)  # they are ready to join by the time that the limit counts from
    for name in ("agent0", "agent1"):
        launch.until_said(name, "waits for a coordinator of")
    first = launch.coordinator("coordinator")
    nodes.ranks(0)
    etcd.kill()
    nodes.end_rank(0, 0, 1)
    assert launch.ends(first, *agents) == [1, 1, 1], nodes.said()
    assert "no ranks start without etcd, and it did not answer within --join-timeout 15" in nodes.said()


def test_another_launch_of_the_same_name_is_refused(nodes: Nodes, etcd: EtcdServer) -> None:
    """Its coordinator and its agents, and the launch whose name it is goes on."""
    launch = Launch(nodes, etcd.address, "--max-restarts", "1", heartbeat=SILENT)
    (nodes.directory / "other.py").touch()
    first = launch.coordinator("coordinator")
    agents = launch.agents(0, 1)
    before = nodes.ranks(0)
    other = launch.coordinator("other", "other.py")
    stranger = nodes.agent(2, "other.py", where=etcd.address)
    assert [process.wait(300) for process in (other, stranger)] == [2, 2]
    message = (
        f"{etcd.address}: job7 is the name of a launch with another script or other arguments, whose coordinator is"
    )
    for name, flag in (("other", "--membership"), ("agent2", "--coordinator")):
        (line,) = nodes.said(name).splitlines()
        assert f"error: {flag} {message} 127.0.0.1:" in line and "give each launch a name of its own" in line
    assert all(runs(pid) for pid, _ in before) and "node 2" not in nodes.said()
    for process in (first, *agents):
        process.kill()
    nodes.until_gone()
    until(lambda: not etcd.has("coordinator"), "the end of the leader's lease")
    other = launch.coordinator("late", "other.py")
    assert other.wait(300) == 2
    lost = (
        "whose coordinators were lost before it ended; give this launch another name, or delete the keys of that one: "
    )
    assert lost in nodes.said("late")
    prefix = nodes.said("late").splitlines()[-1].partition("etcdctl del --prefix ")[2]
    etcd.delete(prefix)
    (nodes.directory / "port").unlink()
    other = launch.coordinator("new", "other.py")
    other.terminate()
    assert other.wait(300) == 128 + signal.SIGTERM, nodes.said("new")


class NotEtcd(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("listens", [False, True])
def test_an_etcd_that_cannot_be_used_is_one_line(nodes: Nodes, *, listens: bool) -> None:
    server = HTTPServer(("127.0.0.1", 0), NotEtcd)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_port if listens else free_port()
    where = f"etcd://127.0.0.1:{port}/{NAME}"
    coordinator = nodes.coordinate("--nnodes", "1", "--membership", where)
    agent = nodes.agent(0, where=where)
    assert (coordinator.wait(300), agent.wait(300)) == (2, 2)
    server.shutdown()
    server.server_close()
    why = f"{where}: 127.0.0.1:{port}: " + (
        "it does not answer as etcd 3.4 or later does" if listens else "Connection ref"
    )
    for name, flag, fix in (
        ("coordinator", "--membership", "start etcd there, or leave the flag out"),
        ("agent0", "--coordinator", "etcd must be reached from"),
    ):
        (line,) = nodes.said(name).splitlines()
        assert f"error: {flag} {why}" in line and fix in line


def test_addresses() -> None:
    assert parse_address("etcd://a:1,b/x") == StoreAddress((("a", 1), ("b", 2379)), "x")
    assert str(parse_address("etcd://a:1,b,[::1]:3/x")) == "etcd://a:1,b:2379,[::1]:3/x"


@pytest.mark.parametrize(
    "wrong",
    ["etcd://a:1", "etcd://a:1/", "etcd://a:x/n", "etcd:///n", "etcd://a/b/c", "http://a/n", "etcd://a:65536/n",
     "etcd://a,,b/n", "etcd://user:word@a:1/n", "etcd://::1/n", "etcd://a:0/n", "etcd://a:1/ "],
)  # fmt: skip
def test_a_wrong_address_is_refused_by_its_flag(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(Path(__file__))
    with pytest.raises(SystemExit):
        parse_coordinator_arguments(["--nnodes", "1", "--membership", wrong, script])
    assert f"--membership {wrong}: must be etcd://" in capsys.readouterr().err
    if wrong.startswith("etcd://"):
        with pytest.raises(SystemExit):
            parse_arguments(["--coordinator", wrong, script])
        assert f"--coordinator {wrong}: must be etcd://" in capsys.readouterr().err
