"""Growth of what a launch uses: samples of its processes, over restarts and over saves without faults."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple

from ..launch import RankLocation
from .snapshot import Process, Snapshot

RANKS, OTHERS = "ranks", "others"  # ranks with their descendants, or all other processes, such as the launcher
RESTARTS, SAVES = "restarts", "saves"  # growth over restarts, or over saves without faults
MIB = 1 << 20

Key = tuple[str, str, str]  # (RANKS or OTHERS, RESTARTS or SAVES, name)


class Usage(NamedTuple):
    """Resources that several processes use in total, or how much more that is at the end. `memory`: resident bytes."""

    processes: int = 0
    threads: int = 0
    descriptors: int = 0
    memory: int = 0

    @staticmethod
    def of(processes: Iterable[Process]) -> Usage:
        each = [(1, one.threads, one.descriptors, one.memory) for one in processes]
        return Usage(*map(sum, zip(*each, strict=True)))

    def excess(self, memory_MiB: float) -> list[str]:
        """A sentence for each resource that has grown: memory by more than `memory_MiB`, the others at all."""
        found = [
            f"{grown} more {name} at the end" for name, grown in zip(self._fields[:-1], self, strict=False) if grown > 0
        ]
        if self.memory > memory_MiB * MIB:
            found.append(f"{self.memory / MIB:.1f} MiB more memory at the end, and {memory_MiB:g} are allowed")
        return found


def grown(samples: Sequence[Usage], usual: Callable[[Iterable[int]], int] = median_low) -> Usage:
    """The minimum over the second half of the samples minus the `usual` value of the first half.

    Work that is in progress when a sample is taken, such as a save in the background, is in some samples only; a leak
    is in every later sample. `max` as `usual` is for few samples: a leak that continues exceeds the maximum, too. With
    fewer than four samples, whose first half is one in which such work may be missing, the growth is 0.
    """
    if len(samples) < 4:
        return Usage()
    half = len(samples) // 2
    before, after = zip(*samples[:half], strict=True), zip(*samples[half:], strict=True)
    return Usage(*(min(late) - usual(early) for early, late in zip(before, after, strict=True)))


class Samples:
    """Samples of the ranks of each host in total, and of every other process of the launch separately.

    A process counts as a different one if its host gets other ranks, since its work then changes.
    """

    def __init__(self) -> None:
        self._samples: dict[Key, list[Usage]] = defaultdict(list)

    def add(self, over: str, host: str, snapshot: Snapshot, ranks: Mapping[int, RankLocation]) -> None:
        """`over`: RESTARTS or SAVES. `ranks`: locations by rank, on all hosts.

        Over RESTARTS each rank is sampled by itself: those whose process starts again have several samples.
        """
        mine = {rank: location.pid for rank, location in ranks.items() if location.host == host}
        of_ranks = snapshot.with_descendants(mine.values())
        place = f"{host}, {f'ranks from {min(mine)}' if mine else 'no ranks'}"
        if of_ranks and over == SAVES:
            usage = Usage.of(process for process in snapshot.processes if process.pid in of_ranks)
            self._samples[RANKS, over, place].append(usage)
        if over == RESTARTS:
            of_pid = {pid: rank for rank, pid in mine.items()}
            for process in (process for process in snapshot.processes if process.pid in of_pid):
                name = f"{host}, rank {of_pid[process.pid]} in process {process.pid}"
                self._samples[RANKS, over, name].append(Usage.of([process]))
        others = [process for process in snapshot.processes if process.pid not in of_ranks]
        for process in others:
            self._samples[OTHERS, over, f"{place}: {process.name} {process.pid}"].append(Usage.of([process]))
        if others:
            total = Usage(processes=len(others), memory=snapshot.slots)
            self._samples[OTHERS, over, f"{place}: processes and slots in total"].append(total)

    def of_each_host(self) -> int:
        """The number of samples of ranks on the host with the fewest."""
        return min((len(samples) for key, samples in self._samples.items() if key[:2] == (RANKS, SAVES)), default=0)

    def growth(self) -> dict[Key, Usage]:
        """The first sample over restarts is not used: nothing was restarted before it."""
        found = {}
        for key, samples in self._samples.items():
            found[key] = grown(samples[1:], max) if key[1] == RESTARTS else grown(samples)
        return found

    def by_name(self) -> dict[str, list[Usage]]:
        """All samples, as they are written to a file."""
        return {"; ".join(key): found for key, found in self._samples.items()}
