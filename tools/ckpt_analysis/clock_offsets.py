"""Hosts whose wall clocks disagree, seen by barriers: all ranks leave a barrier at the same moment."""

from __future__ import annotations

from typing import Any

import polars as pl

from tools.ckpt_analysis.clocks import clock_of
from tools.ckpt_analysis.problems import Problem

# Ranks leave a barrier within milliseconds of each other; time services hold hosts to a few more.
OFFSET_NS = 50_000_000
_NAMED = 5  # hosts that the message names one by one


def check_offsets(spans: pl.DataFrame, processes: list[dict[str, Any]]) -> list[Problem]:
    """Clocks by which ranks left every barrier earlier or later than by most others.

    `spans` are those of `Frames`. The offset of a clock is the median, over the first barriers of all saves and
    loads, of its ranks' median end less that of all ranks: positive if the clock is ahead.
    """
    hosts = {clock_of(process): process["host"] for process in processes}
    if len(hosts) < 2:
        return []
    places = pl.DataFrame(
        [(process["cycle"], process["rank"], clock_of(process)) for process in processes],
        schema={"cycle": pl.Int64, "rank": pl.Int64, "clock": pl.String},
        orient="row",
    )
    # Later barriers of an operation differ from rank to rank: some commit instead.
    first = spans.filter(pl.col("phase") == "barrier").select("op", "group", "cycle", "rank", "end_ns")
    first = first.unique("op", keep="first", maintain_order=True).join(places, on=["cycle", "rank"])
    apart = (
        first.with_columns((pl.col("end_ns") - pl.col("end_ns").median().over("group")).alias("late_ns"))
        .group_by("clock", "group")
        .agg(pl.col("late_ns").median())
        .group_by("clock")
        .agg(
            pl.col("late_ns").median().alias("offset_ns"),
            pl.col("late_ns").abs().min().alias("least_ns"),
            pl.len().alias("barriers"),
        )
        .filter((pl.col("offset_ns").abs() > OFFSET_NS) & (pl.col("least_ns") > OFFSET_NS))
        .sort(pl.col("offset_ns").abs(), "clock", descending=[True, False])
    )
    if apart.is_empty():
        return []
    found = [(hosts[clock], offset / 1e9, count) for clock, offset, _, count in apart.iter_rows()]
    named = "; ".join(
        f"{host} is {abs(offset):.3f} s {'ahead' if offset > 0 else 'behind'} at {count} barrier(s)"
        for host, offset, count in found[:_NAMED]
    )
    more = f"; and {len(found) - _NAMED} more hosts" if len(found) > _NAMED else ""
    message = (
        f"wall clocks disagree: by the barriers that all ranks left together, {named}{more}. Durations on one "
        "rank are right; times between these hosts and others (committed_s, durable_s, restart_s, down_s) are "
        "wrong by up to as much"
    )
    offsets = {host: offset for host, offset, _ in found}
    return [Problem("clock_offset", message, {"hosts": sorted(offsets), "offsets_s": offsets})]
