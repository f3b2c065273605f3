"""Detects growth of resources in processes that repeat the same work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low

import psutil


@dataclass(frozen=True)
class Usage:
    """Resources that several processes use at one time, in total. `memory`: resident bytes."""

    processes: int
    threads: int
    descriptors: int
    memory: int

    @staticmethod
    def of(*processes: psutil.Process) -> Usage:
        """Raises psutil.Error if a process ends while it is sampled."""
        return Usage(
            len(processes),
            sum(process.num_threads() for process in processes),
            sum(process.num_fds() for process in processes),
            sum(process.memory_info().rss for process in processes),
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


def grown(samples: Sequence[Usage]) -> Growth:
    """The minimum over the second half of the samples minus the lower median of the first half.

    Work that is in progress when a sample is taken, such as a save in the background, is in some samples only; a leak
    is in every later sample. With fewer than two samples the growth is 0.
    """
    if len(samples) < 2:
        return Growth()
    half = len(samples) // 2
    before, after = samples[:half], samples[half:]

    def more(use: Callable[[Usage], int]) -> int:
        return min(map(use, after)) - median_low(map(use, before))

    return Growth(
        more(lambda one: one.processes),
        more(lambda one: one.threads),
        more(lambda one: one.descriptors),
        more(lambda one: one.memory) / (1 << 20),
    )
