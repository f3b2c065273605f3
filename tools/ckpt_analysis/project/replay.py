"""Replays the phases of all ranks with other durations.

The phases of a rank keep their order. In a phase that no rank leaves before all have entered it, all ranks wait for
the rank that now enters last, and the time after that entry is kept. So the critical path may move to another rank or
phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..metrics.critical_path import Stretch
from ..metrics.restart_parts import UNNAMED

# Factors that are no phases: they divide the time that was waited for in reads and writes.
READ_BANDWIDTH, WRITE_BANDWIDTH = "read_bandwidth", "write_bandwidth"
MOVED = {READ_BANDWIDTH: "load/read", WRITE_BANDWIDTH: "flush/write"}


@dataclass
class Replayed:
    """A rank in the replay: what is left of its stretches, its time, and the seconds by phase that led there."""

    left: list[Stretch]
    now_s: float
    path: dict[str, float]

    def spend(self, phase: str, seconds: float) -> None:
        self.now_s += seconds
        self.path[phase] = self.path.get(phase, 0.0) + seconds

    def go_on(self, factors: Mapping[str, float], until: tuple[str, int] | None) -> Stretch | None:
        """Everything before the meeting `until` (None: all that is left); returns the stretch of that meeting."""
        while self.left:
            stretch = self.left.pop(0)
            if until is not None and stretch.meeting == until:
                return stretch
            self.spend(phase_of(stretch), seconds_of(stretch, factors))
        return None


def replay(ranks: Mapping[int, Sequence[Stretch]], factors: Mapping[str, float]) -> dict[int, Replayed]:
    """Every rank at the end of its stretches; times are seconds since the first of all stretches began."""
    first_ns = min(stretches[0].start_ns for stretches in ranks.values())
    running: dict[int, Replayed] = {}
    meetings: dict[tuple[str, int], tuple[int, list[int]]] = {}
    for rank, stretches in ranks.items():
        running[rank] = Replayed(list(stretches), 0.0, {})
        running[rank].spend(UNNAMED, (stretches[0].start_ns - first_ns) / 1e9)
        for stretch in stretches:
            if stretch.meeting is not None:
                meetings.setdefault(stretch.meeting, (stretch.came_ns, []))[1].append(rank)
    for meeting, (came_ns, members) in sorted(meetings.items(), key=lambda item: item[1][0]):
        arrived = {rank: running[rank].go_on(factors, meeting) for rank in members}
        last = max(members, key=lambda rank: running[rank].now_s)
        now_s, path = running[last].now_s, running[last].path
        for rank, stretch in arrived.items():
            assert stretch is not None  # a rank meets at the times at which it met: in the order of the last arrivals
            running[rank].now_s, running[rank].path = now_s, dict(path)
            running[rank].spend(phase_of(stretch), (stretch.end_ns - came_ns) / 1e9 * factor_of(stretch, factors))
    for rank in running.values():
        rank.go_on(factors, None)
    return running


def slowest(running: Mapping[int, Replayed]) -> int:
    """The rank that ends last; of equals the first."""
    return max(running, key=lambda rank: running[rank].now_s)


def phase_of(stretch: Stretch) -> str:
    """Name of its phase, without detail."""
    return stretch.phase.split("/")[0]


def factor_of(stretch: Stretch, factors: Mapping[str, float]) -> float:
    """What the time of a stretch is multiplied with."""
    factor = factors.get(phase_of(stretch), 1.0)
    if stretch.phase != phase_of(stretch):
        factor *= factors.get(stretch.phase, 1.0)
    for name, phase in MOVED.items():
        if stretch.phase == phase:
            factor /= factors.get(name, 1.0)
    return factor


def seconds_of(stretch: Stretch, factors: Mapping[str, float]) -> float:
    """New length of a stretch in which nobody is waited for."""
    return (stretch.end_ns - stretch.start_ns) / 1e9 * factor_of(stretch, factors)
