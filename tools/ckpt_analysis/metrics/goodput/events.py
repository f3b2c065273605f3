"""What one process of a job would have recorded with Google's package, from the trace of all of them."""

from __future__ import annotations

import polars as pl

from ...model.frame import Frames
from ..budget import Budget, CycleBudget
from ..rank_tables import RankTables
from .google import Durations, JobCycle

# Phases of a start -> what Google's recorder calls the time; in the time before them, such as imports, it has no name.
INIT = ("cuda_context", "name_lookup", "rendezvous", "communicators")
PREPARATION = ("host_memory", "model_build", "engine_init", "compile", "warmup")
LOADING = ("data_build", "data_skip")


def job_cycles(frames: Frames, tables: RankTables, budget: Budget) -> list[JobCycle]:
    """The events of each cycle, on the rank that the budget is told on; s since the begin of the run."""
    return [_of_cycle(cycle, frames, tables, budget.origin_ns) for cycle in budget.cycles]


def _of_cycle(cycle: CycleBudget, frames: Frames, tables: RankTables, origin_ns: int) -> JobCycle:
    in_cycle = pl.col("cycle") == cycle.cycle
    rank = cycle.rank
    if rank is None:  # no rank made a step
        rank = frames.operations.filter(in_cycle)["rank"].min()
    mine = in_cycle & (pl.col("rank") == rank)
    operations = frames.operations.filter(mine)
    steps = frames.iterations.filter(mine).sort("start_ns")
    busy = tables.phases.filter(
        (pl.col("rank") == rank) & (pl.col("operation") == "startup") & (pl.col("detail") == "")
    )
    phases = busy.join(operations, on="group", how="semi")

    def spent_s(names: tuple[str, ...]) -> float | None:
        found = phases.filter(pl.col("phase").is_in(names))["busy_ns"].to_list()
        return sum(found) / 1e9 if found else None

    def spent_in(operation: str, nanoseconds: str) -> Durations:
        over = operations.filter((pl.col("operation") == operation) & is_over(steps))
        if operation == "load":  # one that found no checkpoint ends well, too
            over = over.filter(pl.col("step").is_not_null() | (pl.col("bytes") > 0))
        spent = over.select("group", "step", "rank").join(tables.totals, on=["group", "rank"])
        return [(step, ns / 1e9) for step, ns in spent.select("step", nanoseconds).drop_nulls(nanoseconds).iter_rows()]

    starts = operations.filter(pl.col("operation") == "startup")["start_ns"]
    return JobCycle(
        started_s=cycle.started_s if starts.is_empty() else (starts[0] - origin_ns) / 1e9,
        ended_s=cycle.ended_well_s,
        init_s=spent_s(INIT) or 0.0,
        preparation_s=spent_s(PREPARATION) or 0.0,
        data_s=spent_s(LOADING),
        steps=[(step, (start_ns - origin_ns) / 1e9) for step, start_ns in steps.select("step", "start_ns").iter_rows()],
        saves=spent_in("save", "blocked_ns"),
        restores=spent_in("load", "wall_ns"),
    )


def is_over(steps: pl.DataFrame) -> pl.Expr:
    """Whether an operation ended well, or has no end but steps after it: then a program went on from it."""
    last_ns = steps["start_ns"].max()
    goes_on = pl.lit(False) if last_ns is None else pl.col("start_ns") < last_ns
    return (pl.col("outcome") == "ok") | ((pl.col("outcome") == "unfinished") & goes_on)


def loads_are_timed(frames: Frames, budget: Budget) -> bool:
    """Whether the end of every load is recorded after which the rank that the budget is told on made a step."""
    for cycle in budget.cycles:
        if cycle.rank is None:  # no rank made a step
            continue
        mine = (pl.col("cycle") == cycle.cycle) & (pl.col("rank") == cycle.rank)
        loads = frames.operations.filter(mine & (pl.col("operation") == "load") & pl.col("end_ns").is_null())
        if not loads.filter(is_over(frames.iterations.filter(mine))).is_empty():
            return False
    return True
