"""Samples of the resources that a launch uses, which must not grow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple

from ..launch import RankLocation
from .growth import Growth, Usage, grown
from .snapshot import Snapshot

RANKS, OTHERS = "ranks", "others"  # ranks with their descendants, or all other processes, such as the launcher
RESTARTS, SAVES = "restarts", "saves"  # growth over restarts, or over saves without faults

Key = tuple[str, str, str]  # (RANKS or OTHERS, RESTARTS or SAVES, name)


class Samples:
    """Samples of the ranks of each host in total, and of every other process of the launch separately.

    A process counts as a different one if its host gets other ranks, since its work then changes.
    """

    def __init__(self) -> None:
        self._samples: dict[Key, list[Usage]] = defaultdict(list)

    def add(self, over: str, host: str, snapshot: Snapshot, ranks: Mapping[int, RankLocation]) -> None:
        """`over`: RESTARTS or SAVES. Ranks are sampled over SAVES only. `ranks`: locations by rank, on all hosts."""
        mine = {rank: location.pid for rank, location in ranks.items() if location.host == host}
        of_ranks = snapshot.with_descendants(mine.values())
        place = f"{host}, {f'ranks from {min(mine)}' if mine else 'no ranks'}"
        if of_ranks and over == SAVES:
            usage = Usage.of(process for process in snapshot.processes if process.pid in of_ranks)
            self._samples[RANKS, over, place].append(usage)
        others = [process for process in snapshot.processes if process.pid not in of_ranks]
        for process in others:
            self._samples[OTHERS, over, f"{place}: {process.name} {process.pid}"].append(Usage.of([process]))
        if others:
            total = Usage(processes=len(others), memory=snapshot.slots)
            self._samples[OTHERS, over, f"{place}: processes and slots in total"].append(total)

    def of_each_host(self) -> int:
        """The number of samples of ranks on the host with the fewest."""
        return min((len(samples) for key, samples in self._samples.items() if key[0] == RANKS), default=0)

    def growth(self) -> dict[Key, Growth]:
        """The first sample over restarts is not used: nothing was restarted before it."""
        found = {}
        for key, samples in self._samples.items():
            found[key] = grown(samples[1:], max) if key[1] == RESTARTS else grown(samples)
        return found

    def as_lists(self) -> dict[str, list[list[int]]]:
        """All samples, as lists of the fields of Usage."""
        return {"; ".join(key): [list(astuple(usage)) for usage in found] for key, found in self._samples.items()}


def largest(growth: Mapping[Key, Growth], whose: str) -> Growth:
    """The largest growth of each resource over the processes of `whose`, which is RANKS or OTHERS."""
    found = [one for key, one in growth.items() if key[0] == whose] or [Growth()]
    return Growth(
        max(one.processes for one in found), max(one.threads for one in found),
        max(one.descriptors for one in found), max(one.memory_MiB for one in found),
    )  # fmt: skip
