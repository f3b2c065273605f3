"""Each rank's time in each phase of each operation, as frames for figures, findings and notebooks."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from ..common.names import OPERATION
from .operations import RankTimes
from .starts import StartTimes


@dataclass(frozen=True)
class RankTables:
    """Rank by rank, in ns; `group` numbers the operations of the run as in `Frames.operations`.

    phases  group, operation, rank, phase, detail, busy_ns; detail is "" for the phase as a whole. Of a
            start-up also the phase "load", whose details are the phases of the load inside
    totals   group, operation, rank, wall_ns (null: unfinished), blocked_ns, drained_ns, covered_ns, own_ns
            (busy time in the phases that are no waiting)
    """

    phases: pl.DataFrame
    totals: pl.DataFrame

    def without(self, groups: list[int]) -> RankTables:
        """The tables without the operations `groups`."""
        others = ~pl.col("group").is_in(groups)
        return RankTables(self.phases.filter(others), self.totals.filter(others))

    def with_phase(self, which: pl.Expr, phase: str, detail: str = "") -> pl.DataFrame:
        """Rows of `totals` that match `which`, with busy_ns: the time in this phase, or in this detail of it.

        It is null where a rank has none.
        """
        part = self.phases.filter((pl.col("phase") == phase) & (pl.col("detail") == detail))
        return self.totals.filter(which).join(part.select("group", "rank", "busy_ns"), on=["group", "rank"], how="left")


def rank_tables(saves: RankTimes, loads: RankTimes, starts: StartTimes) -> RankTables:
    """The tables of all saves, loads and start-ups of a run."""
    parts = (("save", saves), ("load", loads), ("startup", starts))
    phases = pl.concat(times.seconds.with_columns(_named(name)) for name, times in parts)
    totals = pl.concat(times.totals.with_columns(_named(name)) for name, times in parts)
    return RankTables(phases, totals)


def _named(operation: str) -> pl.Expr:
    return pl.lit(operation, OPERATION).alias("operation")
