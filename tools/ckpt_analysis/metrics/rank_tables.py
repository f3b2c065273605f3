"""Every rank's time in every phase of every operation, as frames: what figures and findings are made from."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from ..common.names import OPERATION
from .operations import RankTimes
from .starts import StartTimes

# Time in these is time in which a rank does nothing but wait for other ranks, or for an earlier save.
WAITING = ("barrier", "rendezvous", "wait_previous")


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

    def with_phase(self, phase: str, detail: str = "") -> pl.DataFrame:
        """`totals` with busy_ns: the time in this phase, or in this detail of it; null where a rank has none."""
        part = self.phases.filter((pl.col("phase") == phase) & (pl.col("detail") == detail))
        return self.totals.join(part.select("group", "rank", "busy_ns"), on=["group", "rank"], how="left")


def rank_tables(saves: RankTimes, loads: RankTimes, starts: StartTimes) -> RankTables:
    """The tables of all saves, loads and start-ups of a run."""
    parts = (("save", saves), ("load", loads), ("startup", starts))
    phases = pl.concat(times.seconds.with_columns(_named(name)) for name, times in parts)
    totals = pl.concat(times.totals.with_columns(_named(name)) for name, times in parts)
    return RankTables(phases, _with_own(totals, phases))


def _named(operation: str) -> pl.Expr:
    return pl.lit(operation, OPERATION).alias("operation")


def _with_own(totals: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """Add own_ns. A start-up's load counts without the barriers inside it."""
    whole = (pl.col("detail") == "") & ~pl.col("phase").is_in(WAITING) & (pl.col("phase") != "caught_up")
    inner_wait = (pl.col("phase") == "load") & pl.col("detail").is_in(WAITING)
    own = (
        phases.filter(whole | inner_wait)
        .with_columns(pl.when(inner_wait).then(-pl.col("busy_ns")).otherwise(pl.col("busy_ns")))
        .group_by("group", "rank")
        .agg(pl.col("busy_ns").sum().alias("own_ns"))
    )
    return totals.join(own, on=["group", "rank"], how="left").with_columns(pl.col("own_ns").fill_null(0))
