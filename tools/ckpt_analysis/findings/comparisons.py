"""Comparisons of ranks and hosts with the others in the same operation.

The median of ranks or hosts is the lower one everywhere here: of an even number the smaller of the two in the middle.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from ..common.phase_kinds import WAITING
from ..metrics.phases import PHASE_NAME
from ..metrics.rank_tables import RankTables

RANK_LIMITS = {"ratio": 1.5, "share": 0.1, "least_s": 0.1, "most_ranks": 0.125, "least_ranks": 4, "waited": 0.5}
HOST_LIMITS = {"ratio": 1.3, "share": 0.1, "least_s": 0.1, "most_hosts": 0.25}


def slow_ranks(totals: pl.DataFrame, limits: Mapping[str, float] = RANK_LIMITS) -> pl.DataFrame:
    """Ranks that worked much longer than the median rank: group, operation, rank, own_ns, median_ns, excess_ns.

    Operations in which many ranks did are left out: there the work is divided that way. Of so few ranks that a median
    says nothing (`least_ranks`), one is slow if all others waited for `waited` of its excess over their median.
    """
    is_slowest = pl.col("own_ns") == pl.col("own_ns").max().over("group")
    waited_ns = pl.when(~is_slowest).then(pl.col("covered_ns") - pl.col("own_ns"))
    finished = _uneven(totals, limits).with_columns(
        _median("own_ns").over("group").alias("median_ns"),
        pl.col("wall_ns").max().over("group").alias("longest_ns"),
        pl.len().over("group").alias("ranks"),
        waited_ns.min().over("group").alias("waited_ns"),
    )  # fmt: skip
    excess_ns = pl.col("own_ns") - pl.col("median_ns")
    counts = (pl.col("ranks") >= limits["least_ranks"]) | (pl.col("waited_ns") >= limits["waited"] * excess_ns)
    return _slow(finished, "rank", counts, limits)


def slow_hosts(
    totals: pl.DataFrame, rank_hosts: pl.DataFrame, limits: Mapping[str, float] = HOST_LIMITS
) -> pl.DataFrame:
    """Hosts whose median rank worked longer than those of the others: group, operation, host, own_ns, ...

    `rank_hosts` has the columns group, rank, host. Further columns of the result: median_ns (the median of the
    hosts' medians), excess_ns. Hosts with a single rank are left out: their rank is compared with other ranks.
    """
    finished = _uneven(totals, limits).join(rank_hosts, on=["group", "rank"])
    hosts = finished.group_by("group", "operation", "host").agg(
        _median("own_ns"), pl.col("wall_ns").max(), pl.len().alias("ranks")
    )
    hosts = hosts.with_columns(
        _median("own_ns").over("group").alias("median_ns"),
        pl.col("wall_ns").max().over("group").alias("longest_ns"),
        pl.len().over("group").alias("hosts"),
    )
    return _slow(hosts, "host", (pl.col("hosts") > 1) & (pl.col("ranks") > 1), limits)


def _uneven(totals: pl.DataFrame, limits: Mapping[str, float]) -> pl.DataFrame:
    """The finished ranks of operations in which ranks differ so much that a rank or a host may be slow."""
    finished = totals.filter(pl.col("wall_ns").is_not_null())
    own_ns = finished.group_by("group").agg(pl.col("own_ns").max() - pl.col("own_ns").min())
    uneven = own_ns.filter(pl.col("own_ns") >= limits["least_s"] * 1e9)["group"]
    return finished.filter(pl.col("group").is_in(uneven.implode()))


def _slow(units: pl.DataFrame, unit: str, counts: pl.Expr, limits: Mapping[str, float]) -> pl.DataFrame:
    """Rows of `units` (ranks or hosts) that exceed the limits, in groups where only few do, filtered by `counts`."""
    excess = (pl.col("own_ns") - pl.col("median_ns")).alias("excess_ns")
    slow = units.with_columns(excess).filter(
        counts
        & (pl.col("own_ns") >= limits["ratio"] * pl.col("median_ns"))
        & (pl.col("excess_ns") >= limits["share"] * pl.col("longest_ns"))
        & (pl.col("excess_ns") >= limits["least_s"] * 1e9)
    )
    few = pl.len().over("group") <= pl.max_horizontal(1, limits[f"most_{unit}s"] * pl.col(f"{unit}s"))
    return slow.filter(few).select("group", "operation", unit, "own_ns", "median_ns", "excess_ns")


def against_median(tables: RankTables, group: int, ranks: list[int]) -> tuple[str, float, float] | None:
    """(phase, seconds of `ranks`, seconds of all) where the median of `ranks` exceeds the median of all ranks most.

    The phase includes its detail, as in "flush/fsync". Phases of waiting are left out; None if there are no others.
    """
    of_ranks = _median(pl.col("busy_ns").filter(pl.col("rank").is_in(ranks)))
    table = (
        _work(tables, group)
        .group_by("phase", "detail")
        .agg(of_ranks.alias("ranks_ns"), _median("busy_ns").alias("median_ns"))
    )
    return next(_largest(table).select(PHASE_NAME, pl.col("ranks_ns", "median_ns") / 1e9).iter_rows(), None)


def explain_delay(tables: RankTables, operations: pl.DataFrame, group: int, rank: int, waited_s: float) -> str:
    """Why the others waited `waited_s` for `rank`: a text with the cause that explains at least half of it.

    Checks the phases of the rank first, then a late begin (between hosts as accurate as their clocks).
    """
    found = against_median(tables, group, [rank])
    if found is not None and found[1] - found[2] >= waited_s / 2:
        return f"it spends {found[1]:.3f} s in {found[0]}, the median rank {found[2]:.3f} s"
    starts = operations.filter(pl.col("group") == group)
    mine = pl.col("start_ns").filter(pl.col("rank") == rank).first()
    late_s = starts.select(mine - _median("start_ns")).item() / 1e9
    if late_s >= waited_s / 2:
        return f"it began {late_s:.3f} s after the median rank"
    most = "" if found is None else f"; most comes from {found[0]}"
    return f"no single phase of it, nor a late begin, explains half of that{most}"


def largest_excess(tables: RankTables, group: int) -> pl.DataFrame:
    """`against_median` for each rank: columns rank, phase, ranks_ns, median_ns."""
    work = _work(tables, group).with_columns(_median("busy_ns").over("phase", "detail").alias("median_ns"))
    table = work.rename({"busy_ns": "ranks_ns"})
    first = _largest(table).group_by("rank", maintain_order=True).first()
    return first.select("rank", PHASE_NAME, "ranks_ns", "median_ns")


def _median(values: str | pl.Expr) -> pl.Expr:
    """The lower median: a value of a rank that there is, where the mean of two is neither's."""
    return (pl.col(values) if isinstance(values, str) else values).quantile(0.5, interpolation="lower")


def _largest(table: pl.DataFrame) -> pl.DataFrame:
    excess = pl.col("ranks_ns") - pl.col("median_ns")
    return table.sort(excess, "phase", "detail", descending=[True, False, False])


def _work(tables: RankTables, group: int) -> pl.DataFrame:
    """Busy time of every rank (0 if it has none) in every phase or detail, except phases of waiting."""
    mine = tables.phases.filter(pl.col("group") == group)  # filtered first, since the next step on all rows is slower
    phases = mine.filter(~pl.col("phase").is_in(WAITING))
    has_details = (pl.col("detail") != "").any().over("phase")
    leaves = phases.filter((pl.col("detail") != "") | ~has_details).filter(~pl.col("detail").is_in(WAITING))
    everyone = tables.totals.filter(pl.col("group") == group).select("rank")
    return (
        everyone.join(leaves.select("phase", "detail").unique(), how="cross")
        .join(leaves.select("rank", "phase", "detail", "busy_ns"), on=["rank", "phase", "detail"], how="left")
        .with_columns(pl.col("busy_ns").fill_null(0))
    )
