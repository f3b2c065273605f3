"""In-process restarts over several nodes: whose ranks stay, and whose are killed and forked; real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from megatron.launch.messages import LaunchConnection
from megatron.net.handshake import COORDINATOR, ServerSide
from tests.dist.harness import runs
from tests.unit.megatron.launch.test_launch import until
from tests.unit.megatron.launch.test_membership import EtcdServer, Launch, etcd
from tests.unit.megatron.launch.test_nodes import NEVER_SILENT, SILENT, Nodes, labels, nodes
from tests.unit.trace_helpers import SECRET

pytestmark = pytest.mark.slow  # each starts agents and their ranks
__all__ = ["etcd", "nodes"]  # fixtures

# A rank that waits for another one over a connection of its process, and leaves once that ends, unless it is to hang.
WAITS = """
import pathlib, select, socket
from megatron.processes import in_process_restart
in_process_restart.at_return(lambda: note(f"left_{restart}_{rank}"))
note(f"start_{restart}_{rank}", json.dumps([os.getpid(), *(os.environ[name] for name in NAMES)]))
listening = socket.create_server(("127.0.0.1", 0))
ours = socket.create_connection(listening.getsockname())
other = listening.accept()[0]
while not pathlib.Path("finish").exists():
    if select.select([other], [], [], 0.02)[0] and not pathlib.Path(f"hangs_{rank}").exists():
        sys.exit(1)
    time.sleep(0.02)
"""
FLAGS = ("--in-process-restart", "--return-timeout", "300")


class Returning(Nodes):
    """Nodes whose ranks return."""

    def __init__(self, before: Nodes) -> None:
        super().__init__(before.directory, WAITS)
        self.started = before.started  # which the fixture ends

    def agents(self, *numbers: int, where: str | None = None, flags: Sequence[str] = FLAGS) -> list[Any]:
        # Each has an address of its own, which is that of this host.
        return [self.agent(number, *flags, "--address", f"127.0.0.{number + 1}", where=where) for number in numbers]

    def pids(self, restart: int, count: int = 4) -> list[int]:
        return [pid for pid, _ in self.ranks(restart, count)]

    def note(self, name: str) -> str:
        """What a rank noted under `name`, once it has."""
        path = self.directory / name
        until(path.exists, f"{name}; {self.said('agent1')}")
        return path.read_text()

    def left_start(self, restart: int, rank: int) -> None:
        self.note(f"left_{restart}_{rank}")

    def until_said(self, name: str, text: str) -> None:
        until(lambda: text in self.said(name), f"{text!r} of {name}: {self.said(name)}")

    def end(self, coordinator: Any, agents: Sequence[Any]) -> list[int]:
        """Exit statuses, the coordinator's first."""
        self.finish()
        codes = [process.wait(300) for process in (coordinator, *agents)]
        self.until_gone()
        return codes


@pytest.fixture
def returning(nodes: Nodes) -> Returning:  # noqa: F811
    return Returning(nodes)


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_ranks_stay_on_every_node_and_those_of_a_lost_one_are_forked_on_the_spare(returning: Returning) -> None:
    coordinator = returning.coordinate(
        "--nnodes", "2", "--spares", "1", "--max-restarts", "2", "--heartbeat-timeout", NEVER_SILENT
    )
    agents = returning.agents(0, 1, 2)
    before = returning.pids(0)
    kill(before[3])
    again = returning.pids(1)
    assert again[:3] == before[:3] and again[3] != before[3]
    agents[0].kill()  # it serves the rendezvous
    after = returning.ranks(2)
    assert [pid for pid, _ in after][2:] == again[2:]
    assert labels(after) == ["node2", "node2", "node1", "node1"]
    assert {found["MASTER_ADDR"] for _, found in after} == {"127.0.0.3"}, "as the launcher says, also where they stay"
    assert returning.end(coordinator, agents) == [0, -signal.SIGKILL, 0, 0], returning.said()
    assert "starting ranks 2 again in their processes, others anew" in returning.said("agent1")
    assert "starting ranks 2, 3 again in their processes, others anew" in returning.said("agent1")


def test_a_coordinator_that_restarts_nothing_is_told_of(returning: Returning) -> None:
    coordinator = returning.coordinate("--nnodes", "1", "--heartbeat-timeout", NEVER_SILENT)
    agents = returning.agents(0)
    returning.pids(0, 2)
    assert returning.end(coordinator, agents) == [0, 0], returning.said()
    assert "--in-process-restart: no effect, the coordinator has --max-restarts 0" in returning.said("agent0")


def test_two_nodes_are_lost_at_once(returning: Returning) -> None:
    coordinator = returning.coordinate(
        "--nnodes", "3", "--spares", "2", "--max-restarts", "1", "--heartbeat-timeout", NEVER_SILENT
    )
    agents = returning.agents(0, 1, 2, 3, 4)
    before = returning.pids(0, 6)
    for number in (3, 4):
        returning.until_said("coordinator", f"node {number} (127.0.0.{number + 1}) has joined as a spare")
    kill(agents[0].pid, agents[2].pid)
    after = returning.ranks(1, 6)
    assert [pid for pid, _ in after][2:4] == before[2:4]
    assert labels(after) == ["node3", "node3", "node1", "node1", "node4", "node4"]
    assert returning.end(coordinator, agents)[0] == 0, returning.said()


def test_a_rank_that_does_not_return_is_killed_on_its_node(returning: Returning) -> None:
    coordinator = returning.coordinate("--nnodes", "2", "--max-restarts", "1", "--heartbeat-timeout", NEVER_SILENT)
    agents = returning.agents(0, 1, flags=("--in-process-restart", "--return-timeout", "0.5"))
    before = returning.pids(0)
    (returning.directory / "hangs_3").touch()
    kill(before[0])
    after = returning.pids(1)
    assert [before[rank] == after[rank] for rank in (0, 3)] == [False, False]
    assert returning.end(coordinator, agents) == [0, 0, 0]
    told = returning.said("agent1")  # rank 2 may need longer, too, on a busy machine
    assert re.search(r"killed after --return-timeout 0\.5, since they had not returned: ranks (2, )?3\n", told), told


def test_a_rank_and_a_node_are_lost_while_others_return(returning: Returning) -> None:
    """Rank 1 has returned when it is killed; the node of rank 4 is lost while rank 2 still has to return."""
    coordinator = returning.coordinate(
        "--nnodes", "3", "--spares", "1", "--max-restarts", "1", "--heartbeat-timeout", NEVER_SILENT
    )
    agents = returning.agents(0, 1, 2, 3)
    before = returning.pids(0, 6)
    returning.until_said("coordinator", "node 3 (127.0.0.4) has joined as a spare")
    (returning.directory / "hangs_2").touch()
    kill(before[0])
    for rank in (1, 3, 4, 5):
        returning.left_start(0, rank)
    kill(before[1], agents[2].pid)
    agents[2].wait(300)
    (returning.directory / "hangs_2").unlink()
    after = returning.ranks(1, 6)
    assert [pid for pid, _ in after][2:4] == before[2:4]
    assert labels(after) == ["node0", "node0", "node1", "node1", "node3", "node3"]
    assert returning.end(coordinator, agents)[0] == 0, returning.said()


def where_ranks_wait(returning: Returning) -> tuple[Any, list[Any], list[int]]:
    """Coordinator, agents 0 and 1, and the pids of the latter's ranks, which wait for a spare since 0 was lost."""
    coordinator = returning.coordinate(
        "--nnodes", "2", "--spares", "2", "--max-restarts", "1", "--heartbeat-timeout", SILENT
    )
    agents = returning.agents(0, 1)
    waiting = returning.pids(0)[2:]
    agents[0].kill()
    for rank in (2, 3):
        returning.left_start(0, rank)
    until_asleep(agents[1].pid, *waiting)  # the agent knows that they have returned
    return coordinator, agents, waiting


def until_asleep(*pids: int) -> None:
    """Until all have slept for a while at once: none has anything to do then, however slow the machine is."""
    asleep = 0

    def is_asleep() -> bool:
        nonlocal asleep
        asleep = asleep + 1 if all(psutil.Process(pid).status() == psutil.STATUS_SLEEPING for pid in pids) else 0
        return asleep == 10

    until(is_asleep, f"{pids} to be asleep")


def test_ranks_that_have_returned_end_where_their_node_is_no_part_of_the_start(returning: Returning) -> None:
    """Their agent is stopped, counts as lost, and comes back when others have taken all places."""
    coordinator, agents, waiting = where_ranks_wait(returning)
    agents[1].send_signal(signal.SIGSTOP)
    returning.until_said("coordinator", f"node 1 (127.0.0.2) is lost: no heartbeat for {SILENT} s")
    agents += returning.agents(2, 3)
    assert labels(returning.ranks(1)) == ["node2", "node2", "node3", "node3"]
    assert all(map(runs, waiting))
    agents[1].send_signal(signal.SIGCONT)
    until(lambda: not any(map(runs, waiting)), f"the end of {waiting}; {returning.said('agent1')}")
    returning.until_said("coordinator", "node 1 (127.0.0.2) has joined as a spare")
    assert returning.end(coordinator, agents)[0] == 0, returning.said()


def test_ranks_that_wait_end_with_the_coordinator(returning: Returning) -> None:
    coordinator, agents, _ = where_ranks_wait(returning)
    coordinator.kill()
    assert agents[1].wait(300) == 1
    returning.until_gone()


def test_ranks_that_wait_end_by_a_signal(returning: Returning) -> None:
    coordinator, agents, _ = where_ranks_wait(returning)
    agents[1].terminate()
    assert coordinator.wait(300) == agents[1].wait(300) == 128 + signal.SIGTERM, returning.said()
    returning.until_gone()


@pytest.mark.parametrize("waiting", [False, True])
def test_ranks_stay_when_a_standby_coordinator_takes_over(
    returning: Returning,
    etcd: EtcdServer,
    *,
    waiting: bool,  # noqa: F811
) -> None:
    """Those that run return; those that have returned, and wait for a spare, go on waiting."""
    options = ["--nnodes", "2", "--spares", "1", "--max-restarts", "2", "--heartbeat-timeout", SILENT]
    launch = Launch(returning, etcd.address, *options[2:6], heartbeat=SILENT)
    first = launch.coordinator("coordinator")
    agents = returning.agents(0, 1, where=etcd.address)
    before = returning.pids(0)
    second = launch.standby()
    if waiting:
        agents[0].kill()
        for rank in (2, 3):
            returning.left_start(0, rank)
    first.kill()
    returning.until_said("agent1", "; its ranks have returned" if not waiting else "the coordinator has ended")
    if waiting:
        agents += returning.agents(2, where=etcd.address)
    after = returning.pids(1)
    assert after[2:] == before[2:] and (after == before) == (not waiting)
    assert returning.end(second, agents)[0] == 0, returning.said("standby")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"node_rank": 0}, "this node has another place now"),
        ({"nnodes": 3}, "the job has another layout now"),
        ({"arguments": ["--pipeline-model-parallel-size", "1"]}, "the job has another layout now"),
    ],
)
def test_ranks_stay_where_place_and_layout_are_the_same(
    returning: Returning, changed: dict[str, Any], why: str | None
) -> None:
    """The coordinator is played here."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        (agent,) = returning.agents(1, where=f"127.0.0.1:{listening.getsockname()[1]}")
        server = ServerSide(listening.accept()[0], SECRET.encode(), COORDINATOR)
        until(lambda: server.go_on() is True, "the agent's handshake")
    with contextlib.closing(LaunchConnection(server.connected)) as connection:

        def hears(kind: str) -> bool:
            return any(message["type"] == kind for message in connection.messages())

        start = {
            "nnodes": 2, "node_rank": 1, "master_addr": "127.0.0.1", "master_port": 1, "max_restarts": 1,
            "arguments": [], "waiting": [], "copies": [],
        }  # fmt: skip
        connection.send("welcome", heartbeat_timeout_s=1000.0, launch_id="launch0")
        connection.send("start", generation=0, **start)
        before = [json.loads(returning.note(f"start_0_{rank}"))[0] for rank in (2, 3)]
        connection.send("stop", generation=0, kill=True, why="another node is lost")
        until(lambda: hears("ended"), f"the return; {returning.said('agent1')}")
        connection.send("start", generation=1, **start | changed)
        after = [json.loads(returning.note(f"start_1_{rank + 2 * changed.get('node_rank', 1)}"))[0] for rank in (0, 1)]
        assert (after == before) == (why is None)
        assert why is None or f"ranks that had returned were killed: {why}" in returning.said("agent1")
        connection.send("exit", code=0)
        assert agent.wait(300) == 0
    until(lambda: returning.left() == [], f"the end of {returning.left()}")
