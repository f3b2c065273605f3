"""Detects growth of resources in processes that repeat the same work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from .snapshot import Process


@dataclass(frozen=True)
class Usage:
    """Resources that several processes use at one time, in total. `memory`: resident bytes."""

    processes: int = 0
    threads: int = 0
    descriptors: int = 0
    memory: int = 0

    @staticmethod
    def of(processes: Iterable[Process]) -> Usage:
        found = list(processes)
        return Usage(
            len(found),
            sum(one.threads for one in found),
            sum(one.descriptors for one in found),
            sum(one.memory for one in found),
        )


@dataclass(frozen=True)
class Growth:
    """How much more of each resource is in use at the end than at the beginning."""

    processes: int = 0
    threads: int = 0
    descriptors: int = 0
    memory_MiB: float = 0.0

    def excess(self, memory_MiB: float) -> list[str]:
        """A sentence for each resource that has grown: memory by more than `memory_MiB`, the others at all."""
        found = [
            f"{number} more {name} at the end"
            for name, number in (
                ("processes", self.processes), ("threads", self.threads), ("descriptors", self.descriptors)
            )
            if number > 0
        ]  # fmt: skip
        if self.memory_MiB > memory_MiB:
            found.append(f"{self.memory_MiB:.1f} MiB more memory at the end, and {memory_MiB:g} are allowed")
        return found


def grown(samples: Sequence[Usage], usual: Callable[[Iterable[int]], int] = median_low) -> Growth:
    """The minimum over the second half of the samples minus the `usual` value of the first half.

    Work that is in progress when a sample is taken, such as a save in the background, is in some samples only; a leak
    is in every later sample. `max` as `usual` is for few samples: a leak that continues exceeds the maximum, too. With
    fewer than three samples the growth is 0.
    """
    if len(samples) < 3:
        return Growth()
    half = len(samples) // 2
    before, after = samples[:half], samples[half:]

    def more(use: Callable[[Usage], int]) -> int:
        return min(map(use, after)) - usual(map(use, before))

    return Growth(
        more(lambda one: one.processes),
        more(lambda one: one.threads),
        more(lambda one: one.descriptors),
        more(lambda one: one.memory) / (1 << 20),
    )
