"""The data that rules check: statistics, numbers of each rank, and spans of one run."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from ..metrics.rank_tables import RankTables
from ..metrics.results import OperationStats, PhaseStats, Spread, StartStats
from ..model.frame import Frames


@dataclass(frozen=True)
class Evidence:
    """`hosts` has the columns cycle, rank, host; `probes` is the result of `probe_values.read_probes`.

    `oversubscribed` has cycle, host, ranks, cores of the hosts that ran more ranks than they have cores. `is_ours`: the
    run used this project's trainer, so advice may name its flags. `is_pipeline`: its layout has pipeline stages.
    `imported_once`: the cycles in which a launcher imported for all ranks of a node.
    """

    saves: list[OperationStats]
    loads: list[OperationStats]
    starts: list[StartStats]
    frames: Frames
    tables: RankTables
    hosts: pl.DataFrame
    probes: pl.DataFrame
    oversubscribed: pl.DataFrame
    is_ours: bool
    is_pipeline: bool
    imported_once: frozenset[int]

    @property
    def operations(self) -> list[tuple[str, OperationStats | StartStats]]:
        """All saves, loads and starts with a wall time, each with its kind: "save", "load" or "start"."""
        finished: list[tuple[str, OperationStats | StartStats]] = []
        finished += [("save", save) for save in self.saves if save.wall and save.outcome == "ok"]
        finished += [("load", load) for load in self.loads if load.wall and load.outcome == "ok"]
        finished += [("start", start) for start in self.starts if start.wall]
        return finished


def phase_of(stats: OperationStats | StartStats, phase: str, detail: str | None = None) -> PhaseStats | None:
    """A phase of an operation, or a detail of it; None if no rank has a span of it."""
    for candidate in stats.phases:
        if candidate.name == phase:
            if detail is None:
                return candidate
            return next((d for d in candidate.details if d.name == detail), None)
    return None


def name_of(kind: str, stats: OperationStats | StartStats) -> str:
    """The name of an operation in a finding: "save global_step5 of cycle 0"."""
    if isinstance(stats, StartStats):
        return f"{'restart' if stats.is_restart else 'launch'} of cycle {stats.cycle}"
    tag = f" {stats.tag}" if stats.tag else ""
    return f"{kind}{tag} of cycle {stats.cycle}"


def median_of(time: Spread) -> float:
    """The median in s. A trace always has it; imported logs, which may lack it, are not checked by rules."""
    assert time.median_s is not None
    return time.median_s
