"""The tree of agreements: its form, what goes up and down, and neighbours that do not do their part. Over loopback."""

from __future__ import annotations

import dataclasses
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron.net.connection import Connection
from megatron.net.handshake import MAGIC
from megatron.parallel.connecting import Listener, Neighbours, neighbours_of_all, own_address
from megatron.parallel.tree import (
    LEADERS,
    LOCAL,
    AgreementLostError,
    AgreementTimeoutError,
    Neighbour,
    Tree,
    tree_nodes,
)
from tests.unit.certificates import make_files
from tests.unit.stalls import jump_after

AT_MOST_S = 120.0


@contextmanager
def trees(hosts: list[str], timeout_s: float = AT_MOST_S) -> Iterator[list[Tree]]:
    """A tree of ranks that are threads of this process; `hosts`: of each."""
    listeners = [Listener(rank, host, "127.0.0.1") for rank, host in enumerate(hosts)]
    told = neighbours_of_all([listener.where for listener in listeners])
    with ThreadPoolExecutor(len(hosts)) as pool:
        found = [
            tree
            for (tree,) in pool.map(
                lambda pair: pair[0].connect(pair[1], 1, timeout_s), zip(listeners, told, strict=True)
            )
        ]
    try:
        yield found
    finally:
        for tree in found:
            tree.close()


def on_all(found: list[Tree], work: Callable[[int, Tree], Any]) -> list[Any]:
    """What `work` returns or raises for each rank, all at the same time."""

    def attempt(rank: int) -> Any:
        try:
            return work(rank, found[rank])
        except AgreementLostError as error:
            return error

    with ThreadPoolExecutor(len(found)) as pool:
        return list(pool.map(attempt, range(len(found))))


def hosts_of(number: int, ranks: int) -> list[str]:
    return [f"host{host}" for host in range(number) for _ in range(ranks)]


@pytest.mark.parametrize(
    ("number", "ranks"),
    [
        (1, 1),
        (1, 64),
        (3, 2),
        (1, 1000),
        *(pytest.param(*many, marks=pytest.mark.slow) for many in ((512, 8), (10240, 1))),
    ],
)
def test_every_rank_has_one_parent_and_few_connections(number: int, ranks: int) -> None:
    hosts = hosts_of(number, ranks)
    found = tree_nodes(hosts)
    assert [place.parent for place in found].count(None) == 1 and found[0].parent is None
    for rank, place in enumerate(found):
        assert all(found[child].parent == rank for child in place.children)
        assert len(place.children) <= LEADERS + LOCAL
        if place.parent is not None and hosts[place.parent] != hosts[rank]:  # a leader under a leader
            assert hosts.index(hosts[rank]) == rank and hosts.index(hosts[place.parent]) == place.parent
    assert sum(len(place.children) for place in found) == len(hosts) - 1


def test_ranks_that_are_dealt_over_the_hosts() -> None:
    """As Slurm's cyclic distribution does: neighbours in number are on different hosts."""
    found = tree_nodes(["a", "b", "c"] * 4)
    assert found[0].children == (1, 2, 3, 6, 9) and found[1].children == (4, 7, 10)


@pytest.fixture
def tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable, path in make_files(tmp_path / "tls").variables.items():
        monkeypatch.setenv(variable, path)


@pytest.fixture(params=["plain", "tls"])
def either(request: pytest.FixtureRequest) -> None:
    """Connections without TLS, and with it."""
    if request.param == "tls":
        request.getfixturevalue("tls")


@pytest.mark.slow
@pytest.mark.usefixtures("either")
def test_what_goes_up_and_down() -> None:
    """Large items, too, and ranks that give none."""
    with trees(hosts_of(12, 5)) as found:
        large = os.urandom(3_000_000)

        def work(rank: int, tree: Tree) -> Any:
            all_of_it = tree.up(b"%d" % rank if rank != 7 else large)
            some = tree.up(b"" if rank in (11, 3) else None)
            return all_of_it, some, tree.down(large if rank == 0 else b"ignored")

        results = on_all(found, work)
        expected = [(rank, b"%d" % rank if rank != 7 else large) for rank in range(60)]
        assert results[0] == (expected, [(3, b""), (11, b"")], large)
        assert all(result == (None, None, large) for result in results[1:])
        assert max(tree.connections for tree in found) == 8 + 4


def test_each_rank_is_dealt_its_own() -> None:
    with trees(hosts_of(12, 5)) as found:
        items = [b"%d" % rank * 1000 if rank != 7 else os.urandom(3_000_000) for rank in range(60)]
        for _ in range(2):
            results = on_all(found, lambda rank, tree: (tree.scatter(items if rank == 0 else None), tree.up(b"")))
            assert [item for item, _ in results] == items


def test_a_deadline_is_told_to_all() -> None:
    """Rank 9 does not come. The ranks that do hear of the deadline by the first that has waited for it."""
    with trees(hosts_of(4, 3), timeout_s=0.5) as found:
        results = on_all(found, lambda rank, tree: None if rank == 9 else (tree.up(b""), tree.down(b"")))
        assert all(isinstance(results[rank], AgreementTimeoutError) for rank in range(9)), results
        with pytest.raises(AgreementLostError, match=r"earlier agreement of the ranks has failed: rank .* has waited"):
            found[1].up(b"")


def test_what_has_come_is_taken_though_this_rank_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    with trees(["a", "a"]) as found:
        found[1].up(b"in time")
        jump_after(monkeypatch, 1)  # when the deadline is set
        assert found[0].up(None) == [(1, b"in time")]


def test_a_child_is_taken_that_came_while_this_rank_stood_still() -> None:
    listener = Listener(0, "a", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()

    class Come:
        """In place of the Acceptor, which has let the child in."""

        wait = staticmethod(lambda _: None)
        accepted = staticmethod(lambda: [(ours, struct.pack("!BI", 0, 1))])

    acceptor: Any = Come()
    with theirs:
        told = Neighbours(None, ((1, "a"),), "")
        children = listener._children(acceptor, told, 1, time.monotonic() - 1)
        assert list(children) == [(0, 1)]
        children[0, 1].close()


def test_a_rank_that_gives_up_tells_why() -> None:
    with trees(hosts_of(4, 3)) as found:

        def work(rank: int, tree: Tree) -> Any:
            if rank == 5:
                tree.give_up("has other plans")
            return tree.up(b""), tree.down(b"")

        results = on_all(found, work)
        assert all("rank 5 on host1: has other plans" in str(result) for result in results), results


def test_an_operation_whose_parts_have_arrived_is_done_though_an_end_came_with_them() -> None:
    """Rank 0 hears of rank 1's end as soon as it has told all ranks: those that read late have both at once."""
    hosts = ["a", "b", "c", "c"]  # rank 2 passes on to rank 3 what it hears
    with trees(hosts) as found:
        found[1].up(b"")
        found[3].up(b"")
        found[2].up(b"")
        found[0].up(b"")
        assert found[0].down(b"item") == found[1].down(b"") == b"item"
        assert found[0].down(b"next") == found[1].down(b"") == b"next"
        found[1].give_up("has other plans")
        with pytest.raises(AgreementLostError, match="has other plans"):
            found[0].up(b"")
        assert found[2].down(b"") == found[3].down(b"") == b"item"
        assert found[2].down(b"") == found[3].down(b"") == b"next"
        for rank in (2, 3):
            with pytest.raises(AgreementLostError, match="rank 1 on b: has other plans"):
                found[rank].down(b"")


def test_ranks_that_do_different_things_are_told_so() -> None:
    with trees(["a"] * 3) as found:
        results = on_all(found, lambda rank, tree: tree.down(b"") if rank == 0 else (tree.up(b""), tree.down(b"")))
        again = on_all(found, lambda rank, tree: tree.up(b""))
    assert "the ranks do not do the same, which is a defect" in str([*results, *again])


@pytest.mark.usefixtures("either")
def test_what_was_said_is_read_before_a_connection_is_given_up() -> None:
    """Rank 0 is in the middle of sending more than any buffer holds; rank 1 says why it ends, and does."""
    with trees(["a", "a"]) as found:
        begun = threading.Event()

        def work(rank: int, tree: Tree) -> Any:
            if rank == 1:
                assert begun.wait(AT_MOST_S)
                tree.give_up("the disk is gone")
                return None
            begun.set()
            return tree.down(bytes(50_000_000))

        results = on_all(found, work)
        assert str(results[0]) == "rank 1 on a: the disk is gone"


@pytest.mark.usefixtures("either")
def test_what_was_said_is_read_when_a_small_message_cannot_be_sent() -> None:
    """Rank 1 has gone and said why. The kernel takes what rank 0 sends at first, and then refuses it."""
    with trees(["a", "a"]) as found:
        found[1].give_up("the disk is gone")
        with pytest.raises(AgreementLostError, match="rank 1 on a: the disk is gone"):
            while True:
                found[0].down(b"small")


@pytest.mark.parametrize("size", [4, 50_000_000])  # the second is more than any buffer holds
def test_a_rank_that_ends_after_its_part_is_named_once_the_others_have_theirs(size: int) -> None:
    """Its end is seen while rank 0 waits for rank 2, and its part is there: only what it is to be sent is lost."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pairs = [(socket.create_connection(listening.getsockname()), listening.accept()[0]) for _ in range(2)]
    below = [Neighbour(to_child, rank, f"host{rank}") for rank, (to_child, _) in enumerate(pairs, 1)]
    root = Tree(0, "host0", None, below, AT_MOST_S)
    first, second = (
        Tree(rank, f"host{rank}", Neighbour(to_root, 0, "host0"), [], AT_MOST_S)
        for rank, (_, to_root) in enumerate(pairs, 1)
    )
    with closing(root), closing(first), closing(second), ThreadPoolExecutor(1) as pool:
        first.up(b"1")
        first.close()
        gathered = pool.submit(root.up, b"0")
        until = time.monotonic() + AT_MOST_S
        while below[0].ended is None and time.monotonic() < until:
            time.sleep(0.01)
        second.up(b"2")
        assert gathered.result() == [(0, b"0"), (1, b"1"), (2, b"2")]
        received = pool.submit(second.down, b"")
        with pytest.raises(AgreementLostError, match="^lost the connection to rank 1 on host1: it has ended$"):
            root.down(bytes(size))
        assert len(received.result()) == size
        with pytest.raises(AgreementLostError, match="^lost the connection to rank 1 on host1: it has ended$"):
            second.up(b"")
            second.down(b"")


@pytest.mark.parametrize(
    ("head", "why"),
    [({"kind": [], "number": 1}, "sends what is no agreement"), ({"kind": "up"}, "sends what is no agreement")],
)
def test_what_is_no_agreement_ends_the_connection(head: dict[str, Any], why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = socket.create_connection(listening.getsockname())
        here = Neighbour(listening.accept()[0], 1, "host1")
    with closing(Tree(0, "host0", None, [here], AT_MOST_S)) as root, Connection(there, 100) as other:
        other.put(head)
        with pytest.raises(AgreementLostError, match=f"it {why}"):
            root.up(b"")


def test_strangers_are_turned_away() -> None:
    """One says nothing, one the wrong thing, one leaves at once, one calls itself the child; that comes after them."""
    listeners = [Listener(rank, "a", "127.0.0.1") for rank in range(2)]
    told = neighbours_of_all([listener.where for listener in listeners])
    strangers = [socket.create_connection(("127.0.0.1", listeners[0].where.port)) for _ in range(4)]
    strangers[1].sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")
    strangers[2].close()
    child = b"\0" + (1).to_bytes(4, "big") + bytes(11)  # of tree 0, rank 1
    strangers[3].sendall(MAGIC + bytes(32) + child + bytes(32))  # and no proof
    with ThreadPoolExecutor(2) as pool:
        (root,), (leaf,) = pool.map(lambda rank: listeners[rank].connect(told[rank], 1, AT_MOST_S), range(2))
    results = on_all([root, leaf], lambda rank, tree: tree.up(b"%d" % rank))
    assert results == [[(0, b"0"), (1, b"1")], None]
    for one in (*strangers, root, leaf):
        one.close()


def test_a_child_that_never_comes_is_named() -> None:
    listeners = [Listener(rank, "a", "127.0.0.1") for rank in range(2)]
    told = neighbours_of_all([listener.where for listener in listeners])
    with pytest.raises(AgreementTimeoutError, match="rank 0 on a has waited for rank 1 on a"):
        listeners[0].connect(told[0], 2, 0.1)
    with pytest.raises(AgreementLostError, match=r"rank 1 on a cannot connect to rank 0 on a at 127\.0\.0\.1:\d+: .*"):
        listeners[1].connect(told[1], 1, 5.0)


def test_a_parent_that_does_not_answer_is_named() -> None:
    """It listens, and is stopped or hangs: that is no wrong network."""
    listeners = [Listener(rank, "a", "127.0.0.1") for rank in range(2)]
    told = neighbours_of_all([listener.where for listener in listeners])
    with pytest.raises(AgreementTimeoutError, match="^rank 1 on a has waited for rank 0 on a$"):
        listeners[1].connect(told[1], 1, 0.1)


def test_a_parent_that_ends_is_no_wrong_network() -> None:
    listeners = [Listener(rank, "a", "127.0.0.1") for rank in range(2)]
    told = neighbours_of_all([listener.where for listener in listeners])
    with socket.create_server(("127.0.0.1", 0)) as ends, ThreadPoolExecutor(1) as pool:
        parent = dataclasses.replace(listeners[0].where, port=ends.getsockname()[1])
        future = pool.submit(listeners[1].connect, dataclasses.replace(told[1], parent=parent), 1, AT_MOST_S)
        ends.accept()[0].close()
        with pytest.raises(AgreementLostError, match="cannot connect to rank 0") as lost:
            future.result()
    assert "GLOO_SOCKET_IFNAME" not in str(lost.value)


def test_addresses() -> None:
    assert own_address({}, "127.0.0.1") == "127.0.0.1"
    assert own_address({"GLOO_SOCKET_IFNAME": "lo"}, "192.0.2.1") == "127.0.0.1"
    assert own_address({}, "localhost") in ("127.0.0.1", "::1")
    with pytest.raises(ValueError, match="GLOO_SOCKET_IFNAME no-such0: host .* has no interface of that name"):
        own_address({"GLOO_SOCKET_IFNAME": "no-such0"}, "127.0.0.1")
