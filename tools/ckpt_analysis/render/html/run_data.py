"""Input of the figures: the analysis of one run, and the operations that are shown in detail."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import polars as pl

from ....common.formatting import percent
from ...common.errors import CouldNotRunError
from ...metrics.results import OperationStats, Spread, StartStats, Stats
from ...report import Analysis

FOLDED = 0.01  # of the run's wall time: what took less is folded


@dataclass(frozen=True)
class RunData(Analysis):
    """One run. A figure that shows a single operation shows `save`, `load` or `start`; None: there is none.

    These are the newest that every rank finished (of saves: for which the end of training did not wait, if there is
    one, since that one is no usual save; of starts: `Report.shown_start`).
    """

    save: OperationStats | None
    load: OperationStats | None
    start: StartStats | None

    def is_small(self, took_s: float | None) -> bool:
        """Whether so many seconds are less than FOLDED of the run's wall time; not of a run whose wall is unknown."""
        budget = self.report.budget
        return budget is not None and took_s is not None and took_s < FOLDED * budget.wall_s

    def has_small(self, stats: Stats) -> bool:
        """Whether all operations of the kind of `stats` together are small."""
        return self.is_small(self.took_s(stats))

    def took_s(self, stats: Stats) -> float:
        """What all operations of the kind of `stats` took together: saves, loads, or starts."""
        report = self.report
        alike: list[Stats] = [*report.starts]
        if isinstance(stats, OperationStats):
            alike = [*(report.saves if stats.kind == "save" else report.loads)]
        return sum(one.wall.max_s for one in alike if one.wall)

    def share_text(self, took_s: float) -> str:
        """What share of the run's wall time so many seconds are, after a comma; nothing where that is not known."""
        wall_s = self.report.budget.wall_s if self.report.budget else 0.0
        return f", {percent(took_s / wall_s)} of the run's wall time" if wall_s > 0 else ""

    @property
    def shown(self) -> list[Stats]:
        """The operations that are shown, of save, load and start."""
        return [stats for stats in (self.save, self.load, self.start) if stats is not None]

    def spans_of(self, stats: Stats) -> pl.DataFrame:
        return self.frames.spans_of(pl.col("group") == stats.group)

    def totals_of(self, stats: Stats) -> pl.DataFrame:
        """The rows of `tables.totals`: one per rank."""
        return self.tables.totals.filter(pl.col("group") == stats.group)

    @cached_property
    def places(self) -> pl.DataFrame:
        """cycle, rank, host, tp, pp, dp."""
        rows = [(info.cycle, rank, *place) for info in self.report.cycles for rank, place in info.coordinates.items()]
        schema: dict[str, type[pl.DataType]] = dict.fromkeys(("cycle", "rank", "tp", "pp", "dp"), pl.Int64)
        table = pl.DataFrame(rows, schema=schema, orient="row")
        return table.join(self.hosts, on=["cycle", "rank"], how="left")

    def has_ranks(self, stats: Stats) -> bool:
        """Whether anything is known rank by rank: not of runs that left no trace of their ranks."""
        return not self.totals_of(stats).is_empty()

    def three_ranks(self, stats: Stats) -> list[tuple[str, int]]:
        """The critical rank, then the median and the fastest by wall time, each with that word; of few ranks fewer."""
        finished = self.totals_of(stats).drop_nulls("wall_ns")
        ranks = finished.sort("wall_ns", "rank", descending=[True, False])["rank"].to_list()
        found = {} if stats.critical_rank is None else {stats.critical_rank: "critical"}
        for word, index in (("median", len(ranks) // 2), ("fastest", len(ranks) - 1)):
            if ranks:
                found.setdefault(ranks[index], word)
        return [(word, rank) for rank, word in found.items()]

    def host_of(self, cycle: int, rank: int) -> str:
        rows = self.hosts.filter((pl.col("cycle") == cycle) & (pl.col("rank") == rank))
        return "?" if rows.is_empty() else rows["host"][0]


def choose(analysis: Analysis, checkpoint: str | None = None) -> RunData:
    """Pick the operations to show. `checkpoint` is the tag of the save asked for.

    Raises CouldNotRunError if no save that has an end on some rank has that tag.
    """
    report = analysis.report
    saves = [save for save in report.saves if save.wall]
    if checkpoint is not None:
        saves = [save for save in saves if save.tag == checkpoint]
        if not saves:
            tags = ", ".join(dict.fromkeys(save.tag or "?" for save in report.saves)) or "none"
            raise CouldNotRunError(f"--checkpoint {checkpoint}: no save with this tag ended on any rank; saves: {tags}")
    loads = [load for load in report.loads if load.wall]
    return RunData(**vars(analysis), save=_newest(saves), load=_newest(loads), start=report.shown_start)


def _newest(operations: list[OperationStats]) -> OperationStats | None:
    complete = [operation for operation in operations if operation.outcome == "ok"]
    usual = [operation for operation in complete if not operation.drain_s]
    return (usual or complete or operations or [None])[-1]


def spread_over_saves(
    values: pl.DataFrame, value: pl.Expr, saves: list[OperationStats]
) -> tuple[list[float | None], list[float | None], list[float | None]]:
    """(lowest, median, highest) `value` of each save over the rows of its `group` in `values`."""
    table = values.group_by("group").agg(value.min().alias("low"), value.median(), value.max().alias("high"))
    found = {group: spread for group, *spread in table.iter_rows()}
    low, median, high = zip(*(found.get(save.group, [None] * 3) for save in saves), strict=True)
    return list(low), list(median), list(high)


def title_of(stats: Stats) -> str:
    """How headings name an operation: "Save global_step5, cycle 0"."""
    tag = f" {stats.tag or '(no checkpoint)'}" if isinstance(stats, OperationStats) else ""
    return f"{stats.kind.capitalize()}{tag}, cycle {stats.cycle}"


def wall_of(stats: Stats) -> Spread:
    """Wall time of an operation that was chosen to be shown: those have one."""
    assert stats.wall is not None
    return stats.wall


def worst_of_neighbours(rows: pl.DataFrame, most: int, value: pl.Expr) -> tuple[pl.DataFrame, int]:
    """(`rows`, or of very many the row with the largest `value` of so many neighbours; how many these are)."""
    per_point = -(-rows.height // most)
    if per_point <= 1:
        return rows, 1
    groups = rows.with_row_index("row").group_by(pl.col("row") // per_point, maintain_order=True)
    return groups.agg(pl.all().exclude("row").get(value.arg_max())).drop("row"), per_point
