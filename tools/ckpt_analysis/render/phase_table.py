"""Phases as rows of a table: the columns that the terminal, the summary and the HTML report choose from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ...common.formatting import count, rate, size
from ...common.tables import Column, numbers, times
from ..common.phase_kinds import AFTERWARDS
from ..metrics.results import PhaseStats, Spread


class PhaseLine(NamedTuple):
    """A phase or a detail of one. `stats` is None for times that are not those of a phase: the rest, the whole."""

    name: str
    time: Spread
    stats: PhaseStats | None = None


def phase_lines(phases: list[PhaseStats], detail: str = "{phase}/{detail}") -> list[PhaseLine]:
    """A line per phase and per detail, which is called as the pattern `detail` says."""
    lines = []
    for phase in phases:
        lines.append(PhaseLine(phase.name, phase.time, phase))
        lines += [
            PhaseLine(detail.format(phase=phase.name, detail=entry.name), entry.time, entry) for entry in phase.details
        ]
    return lines


def leaves(phases: list[PhaseStats]) -> list[tuple[str, PhaseStats]]:
    """Phases by name, those with details as their details; without what follows after the operation."""
    found: list[tuple[str, PhaseStats]] = []
    for phase in phases:
        if phase.name not in AFTERWARDS:
            found += [(f"{phase.name}/{d.name}", d) for d in phase.details] or [(phase.name, phase)]
    return found


def time_columns(digits: int = 4) -> list[Column[PhaseLine]]:
    """Seconds of the slowest, the median and the fastest rank."""
    return [
        times("slowest s", lambda line: line.time.max_s, digits),
        numbers("rank", lambda line: line.time.slowest_rank),
        times("median s", lambda line: line.time.median_s, digits),
        times("fastest s", lambda line: line.time.min_s, digits),
    ]


def critical_columns(digits: int, at_critical: str | None) -> list[Column[PhaseLine]]:
    """The spread over the ranks; seconds on the critical rank under the title `at_critical`, unless that is None."""
    columns: list[Column[PhaseLine]] = [times("spread s", lambda line: line.time.spread_s, digits)]
    if at_critical is not None:
        columns.append(times(at_critical, lambda line: line.time.at_critical_s, digits))
    return columns


def volume_columns(unknown: str | None = None) -> list[Column[PhaseLine]]:
    """Bytes, files and throughput. `unknown` is shown for what no span counted; None: the usual sign."""

    def column(title: str, name: str, show: Callable[[Any], str]) -> Column[PhaseLine]:
        def text(line: PhaseLine) -> str:
            value = getattr(line.stats, name, None)
            if line.stats is None or (value is None and unknown is not None):
                return unknown or ""
            return show(value)

        return Column(title, text, lambda line: getattr(line.stats, name, None))

    return [column("bytes", "bytes", size), column("files", "num_files", count), column("GB/s", "GBps", rate)]


def blocking_column() -> Column[PhaseLine]:
    """Whether the training thread waited for the phase."""
    words = {"all": "yes", "some": "partly", "none": "no"}
    return Column("blocking", lambda line: words[line.stats.blocking] if line.stats else "")
