"""What spares are told ahead of the loss of a node: whose place they would take, and whom to ask for its saves."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from megatron.launch import coordinator
from megatron.launch.coordinator import Agent, Coordinator, Launch
from megatron.launch.messages import LaunchConnection
from megatron.net.secret import VARIABLE
from tests.unit.stalls import STILL_S, jump_after
from tests.unit.trace_helpers import SECRET

TIMEOUT_S = 1e6  # of heartbeats: silent is who a test says is
MEMBERS, SPARES = 4, 2


class Running:
    """A coordinator in a generation of four members, and two spares; their ends of the connections."""

    def __init__(self) -> None:
        launch = Launch("script.py", (), MEMBERS, 2, SPARES, 1, TIMEOUT_S, TIMEOUT_S, 0, None, "launch0")
        self.coordinator = Coordinator(launch)
        self.agents: list[Agent] = []
        self.ends: list[LaunchConnection] = []
        with socket.create_server(("127.0.0.1", 0)) as listening:
            for number in range(MEMBERS + SPARES):
                self.ends.append(LaunchConnection(socket.create_connection(listening.getsockname())))
                agent = Agent(
                    LaunchConnection(listening.accept()[0]), 0.0, number, "address", f"host{number}", 100 + number
                )
                agent.place = number if number < MEMBERS else None
                self.agents.append(agent)
        self.coordinator._agents = list(self.agents)
        self.coordinator._port = 1  # of the rendezvous: ranks were started

    def told(self, *silent: int) -> dict[int, dict[str, Any]]:
        """By number, what agents are told when these nodes have been silent for a while."""
        for number, agent in enumerate(self.agents):
            agent.heard = time.monotonic() - (0.6 * TIMEOUT_S if number in silent else 0)
        self.coordinator._prepare_spares()
        return {number: message for number, end in enumerate(self.ends) for message in heard(end)}

    def close(self) -> None:
        for connection in [*self.ends, *(agent.connection for agent in self.agents)]:
            connection.close()
        self.coordinator._acceptor.close()
        self.coordinator._selector.close()


def heard(end: LaunchConnection) -> list[dict[str, Any]]:
    """What has been sent to it so far; over the loopback it is there at once."""
    return end.messages()


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv(VARIABLE, SECRET)
    made = Running()
    yield made
    made.close()


def expect(place: int, *hosts: int) -> dict[str, Any]:
    copies = [[f"host{number}", "address", 100 + number] for number in hosts]
    return {"type": "expect", "node_rank": place, "copies": copies}


def test_a_spare_is_told_once_whose_place_it_would_take(running: Running) -> None:
    assert running.told() == {}
    assert running.told(2) == {4: expect(2, 1, 3, 0)}, "the nearest ones first"
    assert running.told(2) == {}
    assert running.told() == {}, "it was heard again"
    assert running.told(2) == {4: expect(2, 1, 3, 0)}


def test_as_many_spares_as_there_are_places_to_take(running: Running) -> None:
    assert running.told(3) == {4: expect(3, 2, 1, 0)}
    assert running.told(0, 3) == {4: expect(0, 1, 2), 5: expect(3, 2, 1)}
    assert running.told(0, 3, 5) == {}, "one spare is silent itself"
    assert running.told(0, 1, 3) == {5: expect(1, 2)}, "places are taken in their order"


def test_a_member_that_is_lost_is_a_place_to_take(running: Running) -> None:
    running.coordinator._agents.remove(running.agents[1])
    assert running.told() == {4: expect(1, 0, 2, 3)}


def test_a_spare_without_memory_for_copies_is_told_nothing(running: Running) -> None:
    running.agents[4].copies = 0
    assert running.told(2) == {}


def test_nothing_is_told_before_ranks_were_started(running: Running) -> None:
    running.coordinator._port = None
    assert running.told(2) == {}


def test_an_agent_that_is_slow_to_read_gets_its_exit_status(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is full when the launch ends."""
    monkeypatch.setattr(coordinator, "_EXIT_S", TIMEOUT_S)  # however slow this machine is
    slow, end = running.agents[0].connection, running.ends[0]
    number = 0
    while not slow.unsent:
        number += 1
        slow.send("stop", generation=number, kill=False, why="x" * 100_000)
    for other in running.ends[1:]:
        other.close()
    with ThreadPoolExecutor(1) as pool:
        dismissed = pool.submit(running.coordinator._dismiss, 3)
        told: list[dict[str, Any]] = []
        while not dismissed.done() and not any(message["type"] == "exit" for message in told):
            told += end.messages()
        end.close()
    assert told[-1] == {"type": "exit", "code": 3}


def test_what_an_agent_said_before_its_end_counts(running: Running) -> None:
    """A message to it breaks its connection, in the turn in which it tells that its ranks have ended well."""
    leading, first, second = running.coordinator, *running.agents[:2]
    leading._generation, leading._state, leading._members = 0, "running", [first, second]
    for agent in running.agents:
        agent.heard = time.monotonic()
        leading._selector.register(agent.connection, selectors.EVENT_READ)
    first.in_generation = second.in_generation = True
    running.ends[1].send("failed", generation=0, why="rank 2: exit code 1")

    def then_the_first_ends(receive: Callable[[], list[dict[str, Any]]] = second.connection.messages) -> Any:
        first.connection.send("ack", number=1)  # unread, so that the kernel resets the connection
        running.ends[0].send("ended", generation=0, failures=[], refused=0)
        running.ends[0].close()
        return receive()

    second.connection.messages = then_the_first_ends  # type: ignore[method-assign]
    leading._turn()
    assert first not in leading._agents and first.failures == [], first.failures


@pytest.mark.parametrize("limit", ["heartbeat_timeout_s", "join_timeout_s"])
def test_nodes_are_waited_for_longer_by_the_time_in_which_the_coordinator_stood_still(
    running: Running, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Those that come back have not been let in when it goes on."""
    leading = running.coordinator
    leading._launch = replace(leading._launch, **{limit: STILL_S / 2})
    leading._agents, leading._generation, leading._state = [], 0 if limit == "heartbeat_timeout_s" else -1, "gathering"
    leading._joined = set(range(MEMBERS + SPARES))
    assert leading._turn() is None
    jump_after(monkeypatch, 0)
    assert leading._turn() is None
