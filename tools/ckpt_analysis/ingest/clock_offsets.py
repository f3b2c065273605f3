"""Finds hosts whose wall clock is wrong: all ranks leave a barrier at the same time, so its end shows it."""

from __future__ import annotations

from typing import Any

import polars as pl

from ..common.problems import Problem
from .clocks import clock_of
from .records import Records

# Ranks leave a barrier within milliseconds of each other; time services hold hosts to a few more.
OFFSET_NS = 50_000_000
_NAMED = 5  # hosts that the message names one by one


def measure_offsets(records: Records, clock_of_file: list[str]) -> dict[str, tuple[int, int]]:
    """Clocks whose ranks left every barrier earlier or later than most: (ns that it is ahead, barriers).

    `records` hold Unix times, their operations `group`; `clock_of_file` names the clock of each file. The offset
    of a clock is the median, over the first barriers of all saves and loads, of its ranks' median end less that
    of all ranks.
    """
    clocks = pl.Series("clock", clock_of_file, dtype=pl.Categorical)
    if clocks.n_unique() < 2:
        return {}
    operations = records.operations
    # Later barriers of an operation differ from rank to rank: some commit instead.
    first = records.spans.filter(pl.col("phase") == "barrier").select("op", "end_ns")
    first = first.filter(pl.col("op").ne_missing(pl.col("op").shift(1)))  # they are sorted by op and start
    group, files = operations["group"].gather(first["op"]), operations["file_index"].gather(first["op"])
    first = first.with_columns(group, clocks.gather(files))
    apart = (
        first.with_columns((pl.col("end_ns") - pl.col("end_ns").median().over("group")).alias("late_ns"))
        .group_by("clock", "group")
        .agg(pl.col("late_ns").median())
        .group_by("clock")
        .agg(
            pl.col("late_ns").median().round().cast(pl.Int64).alias("offset_ns"),
            pl.col("late_ns").abs().min().alias("least_ns"),
            pl.len().alias("barriers"),
        )
        .filter((pl.col("offset_ns").abs() > OFFSET_NS) & (pl.col("least_ns") > OFFSET_NS))
    )
    return {clock: (offset, barriers) for clock, offset, _, barriers in apart.iter_rows()}


def describe_offsets(offsets: dict[str, tuple[int, int]], processes: list[dict[str, Any]]) -> list[Problem]:
    """The problem that some clocks were off, if there are any."""
    if not offsets:
        return []
    hosts = {clock_of(process): process["host"] for process in processes}
    found = sorted((hosts[clock], ns / 1e9, barriers) for clock, (ns, barriers) in offsets.items())
    found.sort(key=lambda entry: -abs(entry[1]))
    named = "; ".join(
        f"{host} is {abs(ahead_s):.3f} s {'ahead' if ahead_s > 0 else 'behind'} ({barriers} barriers)"
        for host, ahead_s, barriers in found[:_NAMED]
    )
    more = f"; and {len(found) - _NAMED} more hosts" if len(found) > _NAMED else ""
    message = (
        f"wall clocks disagree, by the barriers that all ranks leave together: {named}{more}. The times of these "
        "hosts were shifted by as much; durations on one rank are as recorded"
    )
    ahead = {host: ahead_s for host, ahead_s, _ in found}
    return [Problem("clock_offset", message, {"hosts": sorted(ahead), "ahead_s": ahead})]
