"""Who holds whose copies: group, mixed and ring, failure domains, and the probabilities that `project` says of them."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest

from megatron.peers.placement import PlacementError, holders, number_of_copies, place, read_domains
from tools.ckpt_analysis.project.replicas import survival_probability

HOSTS = [f"node{i}" for i in range(9)]


@pytest.mark.parametrize(
    ("asked", "hosts", "served", "copies", "warned"),
    [
        (None, 1, True, 1, "this is one host, so its saves are in memory of their own host alone"),
        (None, 2, True, 2, None),
        (None, 2, False, 1, "copies on other hosts are held by the agents of megatron.launch; start it with"),
        (1, 4, True, 1, None),
        (3, 4, True, 3, None),
    ],
)
def test_how_many_copies(asked: int | None, hosts: int, served: bool, copies: int, warned: str | None) -> None:
    found, warning = number_of_copies(asked, hosts, served)
    assert found == copies
    assert warning is None if warned is None else warning is not None and warned in warning


@pytest.mark.parametrize(
    ("asked", "hosts", "served", "refused"),
    [
        (3, 2, True, r"--replicas 3: more copies than hosts \(2\); give 2 at most"),
        (2, 1, True, r"--replicas 2: more copies than hosts \(1\)"),
        (2, 2, False, "--replicas 2: copies on other hosts are held by the agents"),
    ],
)
def test_more_copies_than_there_can_be(asked: int, hosts: int, served: bool, refused: str) -> None:
    with pytest.raises(PlacementError, match=f"^{refused}"):
        number_of_copies(asked, hosts, served)


def test_groups_the_rest_in_a_ring_and_a_ring() -> None:
    assert holders(4, 2) == [(1,), (0,), (3,), (2,)]
    assert holders(5, 2) == [(1,), (0,), (3,), (4,), (2,)]
    assert holders(4, 3) == [(1, 2), (2, 3), (3, 0), (0, 1)]
    assert holders(4, 2, ring=True) == [(1,), (2,), (3,), (0,)]
    assert holders(3, 1) == [(), (), ()]


@pytest.mark.parametrize(("hosts", "copies"), [(4, 2), (6, 2), (6, 3), (5, 2), (7, 2), (7, 3), (8, 3)])
@pytest.mark.parametrize("ring", [False, True])
def test_they_survive_as_often_as_project_says(hosts: int, copies: int, ring: bool) -> None:
    """Counted over all choices of lost hosts: one mechanism cannot be changed without the other."""
    name = "ring" if ring else ("group" if hosts % copies == 0 else "mixed")
    placed = holders(hosts, copies, ring=ring)
    for lost in range(hosts + 1):
        choices = list(combinations(range(hosts), lost))
        kept = sum(all({host, *others} - set(gone) for host, others in enumerate(placed)) for gone in choices)
        assert Fraction(kept, len(choices)) == survival_probability(name, hosts, copies, lost), (lost, placed)


@pytest.mark.parametrize(
    ("sizes", "copies", "fits"),
    [
        ((4, 4), 2, True),
        ((3, 3, 2), 2, True),
        ((5, 3), 2, False),
        ((3, 2, 2), 2, True),
        ((2, 1), 2, False),  # a ring of three has each host beside each other
        ((1, 1, 1), 2, True),
        ((2, 2, 2), 3, True),
        ((3, 3, 3), 3, True),
        ((3, 2, 1), 3, False),
        ((4, 4), 3, False),
        ((1, 1, 1, 1, 1), 3, True),
        ((2, 2, 2, 1, 1), 3, True),
    ],
)
def test_no_two_copies_in_one_domain_where_that_can_be(sizes: tuple[int, ...], copies: int, fits: bool) -> None:
    names = [f"rack{rack}" for rack, size in enumerate(sizes) for _ in range(size)]
    hosts = HOSTS[: len(names)]
    domains = dict(zip(hosts, names, strict=True))
    if not fits:
        with pytest.raises(
            PlacementError, match=rf"^--failure-domain: {copies} copies .* \(hosts of each: rack0 {sizes[0]}"
        ):
            place(hosts, copies, domains)
        return
    for host, others in enumerate(place(hosts, copies, domains)):
        assert len({names[host], *(names[other] for other in others)}) == copies
        assert len(others) == copies - 1


def test_a_domain_that_has_most_hosts_is_refused() -> None:
    domains = dict.fromkeys(HOSTS, "a") | {"node8": "b"}
    with pytest.raises(PlacementError, match=r"cannot all be in different domains \(hosts of each: a 8, b 1\)"):
        place(HOSTS, 2, domains)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node0 rack0 x\n", r"line 1 is not HOST DOMAIN; give each host one line"),
        ("node0 rack0\n\n# node1 is down\nnode0 rack1\n", r"line 4 names node0 again"),
        (None, r"cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "domains"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlacementError, match=f"^--failure-domain {path}: {message}"):
        read_domains(str(path))


def test_comments_and_empty_lines(tmp_path: Path) -> None:
    path = tmp_path / "domains"
    path.write_text("# racks\nnode0 rack0\n\nnode1 rack1  # at the back\n")
    assert read_domains(str(path)) == {"node0": "rack0", "node1": "rack1"}
