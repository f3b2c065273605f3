"""Who is found to be missing, by ranks that ask each other through a real store."""

from __future__ import annotations

import dataclasses
import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]  they are documented

from megatron.startup import roll_call
from megatron.startup.roll_call import STUCK, WAITS, WORKS, Answer, call, judge
from tests.unit.stalls import stand_still_in_sleep

HOSTS = {0: "node0", 1: "node0", 2: "node1", 3: "node1"}


def waiting(rank: int, seconds: float = 15.0) -> Answer:
    return Answer(rank, HOSTS[rank], "training step 7", seconds, WAITS)


@pytest.mark.parametrize(
    ("hosts", "answers", "found"),
    [
        (HOSTS, [waiting(0), waiting(1), waiting(2)], "rank 3 on node1 does not answer: stopped or ended"),
        (HOSTS, [waiting(0), waiting(1)], "ranks 2, 3 on node1 do not answer"),
        ({0: "node0"}, [waiting(0)], "ranks 1, 2, 3 never came to the rendezvous"),
        (
            HOSTS,
            [waiting(0), waiting(1), waiting(2), Answer(3, "node1", "fsync of /ckpt/f", 15.2, STUCK)],
            "rank 3 on node1 has been in fsync of /ckpt/f for 15.2 s",
        ),
        (
            HOSTS,
            [waiting(0), waiting(1), Answer(2, "node1", "load load", 3.0, WORKS), Answer(3, "node1", "s", 9.0, WORKS)],
            "rank 3 on node1 has been in s for 9.0 s; rank 2 on node1 has been in load load for 3.0 s",
        ),
        (
            HOSTS,
            [waiting(0), waiting(1), waiting(2), waiting(3, 0.5)],
            "all ranks answer, and each waits for others; the last to begin was rank 3 on node1, in training step 7",
        ),
    ],
    ids=["one", "a-host", "never-came", "stuck", "works", "nobody"],
)
def test_who_is_to_blame(hosts: dict[int, str], answers: list[Answer], found: str) -> None:
    assert found in judge(4, hosts, answers)


def test_a_rank_at_its_own_work_is_not_named_beside_one_that_does_not_answer() -> None:
    found = judge(4, HOSTS, [waiting(0), Answer(1, "node0", "save collect", 0.1, WORKS)])
    assert "ranks 2, 3 on node1 do not answer" in found and "rank 1" not in found


@pytest.fixture
def server() -> Any:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server: Any) -> Any:
    store = TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(minutes=5))
    return PrefixStore("a", store)


def test_a_rank_calls_the_others_hear_it_and_all_find_the_same(server: Any) -> None:
    """Rank 3 has come to the rendezvous and does not answer."""
    for rank, host in HOSTS.items():
        roll_call.register(client(server), rank, host)
    found: dict[int, str] = {}

    def listen(rank: int) -> None:
        store = client(server)
        roll_call.wait_for_call(store, timedelta(minutes=5))
        found[rank] = call(store, waiting(rank), 4)

    listening = [threading.Thread(target=listen, args=(rank,)) for rank in (1, 2)]
    for thread in listening:
        thread.start()
    found[0] = call(client(server), waiting(0), 4)
    for thread in listening:
        thread.join()
    assert len(found) == 3 and len(set(found.values())) == 1
    assert found[0].startswith("rank 3 on node1 does not answer")


def test_nobody_calls(server: Any) -> None:
    with pytest.raises(RuntimeError):
        roll_call.wait_for_call(client(server), timedelta(milliseconds=10))


def test_ranks_have_time_to_answer_though_the_machine_stood_still(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were stopped as well, and go on at the same time."""
    other = client(server)
    for rank in range(2):
        roll_call.register(other, rank, "node0")

    def then(number: int) -> None:
        if number == 2:
            other.append(roll_call._ANSWERS, json.dumps(dataclasses.asdict(waiting(1))) + "\n")
            other.add(roll_call._COUNT, 1)

    stand_still_in_sleep(monkeypatch, 1, then)
    assert "does not answer" not in call(client(server), waiting(0), 2)
