"""Checkpoints kept in the memory of several nodes: how likely one copy of each survives the loss of nodes.

The placements and the bound are of Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints", SOSP 2023 (doi:10.1145/3600006.3613145), section 4 and appendices A and B. Every node keeps a copy of its
own part of the checkpoint and sends it to m - 1 others. The exact probability is counted here; the paper gives a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from ..common.errors import CouldNotRunError

PLACEMENTS = ("group", "ring", "mixed")


@dataclass(frozen=True)
class Survival:
    """Of `nodes` nodes with `replicas` copies each, `lost_nodes` at once: whether a copy of every part is left.

    `probability` is exact, over all choices of the lost nodes alike; `bound` is the paper's lower bound (its
    corollary 1), which counts a loss once for every set of nodes that it empties.
    """

    placement: str
    nodes: int
    replicas: int
    lost_nodes: int
    probability: float
    bound: float


def survivals(placement: str, nodes: Sequence[int], replicas: int, lost: Sequence[int]) -> list[Survival]:
    """One Survival for each number of nodes and each number of nodes lost.

    Raises CouldNotRunError naming the flag where the numbers cannot be.
    """
    return [
        Survival(
            placement,
            count,
            replicas,
            gone,
            float(survival_probability(placement, count, replicas, gone)),
            float(survival_bound(placement, count, replicas, gone)),
        )
        for count in nodes
        for gone in lost
    ]


def survival_probability(placement: str, nodes: int, replicas: int, lost: int) -> Fraction:
    """Share of all choices of `lost` nodes that leave a copy of every part. Raises CouldNotRunError as `survivals`."""
    groups, ring = _shape(placement, nodes, replicas)
    _check_lost(nodes, lost)
    # Coefficient of x^k: ways to lose k nodes of one group, all but all of them.
    group = [comb(replicas, k) for k in range(replicas)]
    ways = _power(group, groups, lost)
    if ring:
        ways = _product(ways, _ring_losses(ring, replicas, lost), lost)
    return Fraction(ways[lost] if lost < len(ways) else 0, comb(nodes, lost))


def survival_bound(placement: str, nodes: int, replicas: int, lost: int) -> Fraction:
    """max(0, 1 - s C(N - m, k - m) / C(N, k)), s the number of different sets of nodes that hold a part's copies.

    For groups s is N / m, which is the paper's corollary 1; 1 where fewer nodes are lost than there are copies. Raises
    CouldNotRunError as `survivals`.
    """
    groups, ring = _shape(placement, nodes, replicas)
    _check_lost(nodes, lost)
    if lost < replicas:
        return Fraction(1)
    sets = groups + (1 if ring == replicas else ring)
    return max(Fraction(0), 1 - Fraction(sets * comb(nodes - replicas, lost - replicas), comb(nodes, lost)))


def _shape(placement: str, nodes: int, replicas: int) -> tuple[int, int]:
    """(groups of `replicas` nodes, nodes in one ring): where the copies of `placement` are."""
    if replicas > nodes:
        raise CouldNotRunError(f"--replicas {replicas}: more copies than --nodes {nodes}; give {nodes} at most")
    if placement == "ring":
        return 0, nodes
    if nodes % replicas == 0:
        return nodes // replicas, 0
    if placement == "group":
        raise CouldNotRunError(
            f"--placement group: --nodes {nodes} is no multiple of --replicas {replicas}; use --placement mixed"
        )
    groups = nodes // replicas - 1
    return groups, nodes - groups * replicas


def _check_lost(nodes: int, lost: int) -> None:
    if lost > nodes:
        raise CouldNotRunError(f"--lost-nodes {lost}: more than --nodes {nodes}; give {nodes} at most")


def _ring_losses(nodes: int, replicas: int, most: int) -> list[int]:
    """Coefficient of x^k: ways to lose k nodes of a ring of which no `replicas` stand side by side.

    Counted as closed walks: the state is how many lost nodes stand just before, and it never reaches `replicas`.
    """
    total = [0] * (most + 1)
    for first in range(replicas):
        runs = [[1] if run == first else [0] for run in range(replicas)]
        for _ in range(nodes):
            kept = _sum(runs, most)
            runs = [kept] + [[0, *ways][: most + 1] for ways in runs[:-1]]
        total = _sum([total, runs[first]], most)
    return total


def _sum(terms: Sequence[Sequence[int]], most: int) -> list[int]:
    width = min(most + 1, max(map(len, terms)))
    return [sum(term[k] for term in terms if k < len(term)) for k in range(width)]


def _product(one: Sequence[int], other: Sequence[int], most: int) -> list[int]:
    found = [0] * min(most + 1, len(one) + len(other) - 1)
    for i, a in enumerate(one[: len(found)]):
        for j, b in enumerate(other[: len(found) - i]):
            found[i + j] += a * b
    return found


def _power(base: Sequence[int], exponent: int, most: int) -> list[int]:
    found = [1]
    square = list(base)
    while exponent:
        if exponent & 1:
            found = _product(found, square, most)
        exponent >>= 1
        if exponent:
            square = _product(square, square, most)
    return found
