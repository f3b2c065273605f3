"""Who of several readers takes what: a division that each of them computes by itself, with the same result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def share_of(items: Sequence[Any], rank: int, world_size: int) -> Sequence[Any]:
    """The part of `items` that `rank` takes: those of all ranks, in their order, are `items` in order."""
    return items[len(items) * rank // world_size : len(items) * (rank + 1) // world_size]


def spread(sizes: Sequence[int], readers: int) -> list[int]:
    """Which of `readers` takes each of the items of these sizes: the largest first, each to who has the least."""
    load = [0] * readers
    found = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        found[item] = load.index(min(load))
        load[found[item]] += sizes[item]
    return found


def spread_over_replicas(sizes: Sequence[int], replicas: Sequence[range]) -> list[int]:
    """The DP rank that reads each of some items, of these sizes, which these `replicas` need."""
    readers = [0] * len(sizes)
    for alike in set(replicas):
        positions = [i for i, needing in enumerate(replicas) if needing == alike]
        of_each = spread([sizes[i] for i in positions], len(alike))
        for i, reader in zip(positions, of_each, strict=True):
            readers[i] = alike[reader]
    return readers
