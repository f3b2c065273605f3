"""Divides the wall time of a run, over all its cycles: training that counts, blocked, starting, wasted, other.

Cycles follow one another without gaps, unless one ended well: the time until the next is none of the run's. One rank
represents each cycle: of the ranks with the most training steps the one that saves blocked longest, since the others
wait for it in their next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from ..model.frame import Frames
from .failures import failure_of
from .rank_totals import blocking_spans
from .results import StartStats
from .starts import StartTimes

LAUNCHING, RESTARTING, TRAINING, BLOCKED, WASTED, OTHER = PARTS = (
    "launching", "restarting", "training", "blocked", "wasted", "other",
)  # fmt: skip
_PLACE = ["cycle", "rank"]


@dataclass(frozen=True)
class Segment:
    """A stretch of a cycle that belongs to one part; times in s since the begin of the run."""

    cycle: int
    part: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class CycleBudget:
    """One cycle: the rank it is told on (None: no rank recorded a step), and seconds of each of PARTS.

    Its moments are in s since the begin of the run: where it begins and ends, its first process, the end of the last
    rank's first step, and where all ranks ended by themselves; None: it has none.
    """

    cycle: int
    rank: int | None
    seconds: dict[str, float]
    begin_s: float
    started_s: float
    ready_s: float | None
    end_s: float
    ended_well_s: float | None


@dataclass(frozen=True)
class Budget:
    """A run, which begins at `origin_ns` (Unix time). `seconds` has each of PARTS and adds up to `wall_s`.

    `segments` follow one another without a gap, but for those of `idle_s` in all: after a cycle that ended well.
    """

    origin_ns: int
    wall_s: float
    idle_s: float
    seconds: dict[str, float]
    cycles: list[CycleBudget]
    segments: list[Segment]

    @property
    def goodput(self) -> float | None:
        """Training that counts over wall time; None for a run of no length."""
        return self.seconds[TRAINING] / self.wall_s if self.wall_s > 0 else None


@dataclass(frozen=True)
class _Cycle:
    """Unix ns: `ready` is the end of the last rank's first step, `end` where it has none; see CycleBudget."""

    number: int
    begin: int
    started: int
    first_step: int | None
    ready: int
    end: int
    ended_well: int | None
    starting: str
    kept: int | None  # last step that no later cycle resumed before; None: all count
    is_complete: bool  # it is the last one, or ended well: nothing is lost after its last step


def make_budget(
    frames: Frames, starts: Sequence[StartStats], times: StartTimes, save_totals: pl.DataFrame
) -> Budget | None:
    """The budget of a run; None if no start-up was recorded. `save_totals`: `RankTimes.totals` of its saves."""
    cycles = _cycles(frames, starts, times)
    if not cycles:
        return None
    told_on = _ranks(frames, save_totals)
    chosen = pl.DataFrame(list(told_on.items()), schema=dict.fromkeys(_PLACE, pl.Int64), orient="row")
    of_ranks = pl.col("rank").is_in(chosen["rank"].unique().implode())  # leaves few to join
    saves = frames.spans_of((pl.col("operation") == "save") & of_ranks)
    blocked, _ = blocking_spans(saves.join(chosen, on=_PLACE, how="semi"))
    steps = frames.iterations.filter(of_ranks).join(chosen, on=_PLACE, how="semi")
    origin = cycles[0].begin

    def since(moment_ns: int) -> float:
        return (moment_ns - origin) / 1e9

    segments: list[Segment] = []
    entries: list[CycleBudget] = []
    for cycle in cycles:
        mine = pl.col("cycle") == cycle.number
        rows = _cut(cycle, steps.filter(mine), blocked.filter(mine))
        found = [Segment(cycle.number, part, since(a), since(b)) for part, a, b in rows.iter_rows()]
        segments += found
        seconds = {part: sum(one.end_s - one.start_s for one in found if one.part == part) for part in PARTS}
        entries.append(
            CycleBudget(
                cycle=cycle.number,
                rank=told_on.get(cycle.number),
                seconds=seconds,
                begin_s=since(cycle.begin),
                started_s=since(cycle.started),
                ready_s=None if cycle.first_step is None else since(cycle.first_step),
                end_s=since(cycle.end),
                ended_well_s=None if cycle.ended_well is None else since(cycle.ended_well),
            )
        )
    total = {part: sum(entry.seconds[part] for entry in entries) for part in PARTS}
    wall_ns = sum(cycle.end - cycle.begin for cycle in cycles)
    return Budget(origin, wall_ns / 1e9, (cycles[-1].end - origin - wall_ns) / 1e9, total, entries, segments)


def _cycles(frames: Frames, starts: Sequence[StartStats], times: StartTimes) -> list[_Cycle]:
    """The cycles that recorded a start. Each begins with the failure, or the last record, of the one before.

    After one that ended well it begins with its own start.
    """
    clean = times.clean_ends
    begun = times.startups.group_by("cycle").agg(pl.col("start_ns").min(), pl.col("end_ns").max()).sort("cycle")
    rows = list(begun.iter_rows())
    begins: list[int] = []
    for index, (number, start_ns, _) in enumerate(rows):
        before = rows[index - 1][0] if index else None
        failure = failure_of(frames.events, number - 1) if index else None
        if failure is not None:
            begin_ns = failure.began_ns
        else:
            begin_ns = start_ns if before is None or before in clean else times.last_records[before]
        begins.append(max([begin_ns, *begins[-1:]]))
    resumed = {start.cycle: start.resumed_step for start in starts}
    restarts = {start.cycle for start in starts if start.is_restart}
    found = []
    for index, (number, started, ready) in enumerate(rows):
        is_last = index == len(rows) - 1
        is_complete = is_last or (number in clean and begins[index + 1] >= clean[number])
        end = max(times.last_records[number] if is_complete else begins[index + 1], begins[index])
        later = [step for cycle, step in resumed.items() if cycle > number and step is not None]
        starting = RESTARTING if number in restarts else LAUNCHING
        until = end if ready is None else min(max(ready, begins[index]), end)
        kept = min(later, default=None)
        ended_well = clean.get(number)
        found.append(_Cycle(number, begins[index], started, ready, until, end, ended_well, starting, kept, is_complete))
    return found


def _ranks(frames: Frames, save_totals: pl.DataFrame) -> dict[int, int]:
    """cycle -> rank that it is told on, of cycles with a step."""
    of_group = frames.operations.select("group", "cycle").unique()
    blocked = save_totals.join(of_group, on="group").group_by(_PLACE).agg(pl.col("blocked_ns").sum())
    steps = frames.iterations.group_by(_PLACE).agg(pl.len().alias("steps"))
    ranks = steps.join(blocked, on=_PLACE, how="left").with_columns(pl.col("blocked_ns").fill_null(0))
    best = ranks.sort("steps", "blocked_ns", "rank", descending=[True, True, False])
    return dict(best.unique("cycle", keep="first", maintain_order=True).select(_PLACE).iter_rows())


def _cut(cycle: _Cycle, steps: pl.DataFrame, blocked: pl.DataFrame) -> pl.DataFrame:
    """part, start_ns, end_ns: the cycle from begin to end. Where layers overlap, the first of these counts.

    Starting; blocked by a save; a step that counts; one that was undone, and what came after the last step or save
    until the failure. What no layer covers is `other`.
    """
    step = pl.lit(TRAINING) if cycle.kept is None else pl.when(pl.col("step") <= cycle.kept).then(pl.lit(TRAINING))
    ends = [end for part in (steps, blocked) if (end := part["end_ns"].max()) is not None]
    tail = [] if cycle.is_complete or not ends else [(WASTED, max(ends), cycle.end)]  # type: ignore[type-var]
    window = ["start_ns", "end_ns"]
    layers = (cycle.starting, BLOCKED, TRAINING, WASTED)
    schema = {"part": pl.String} | dict.fromkeys(window, pl.Int64)
    # OTHER is no layer: its row makes the stretches begin and end with the cycle.
    known = [(cycle.starting, cycle.begin, cycle.ready), *tail, (OTHER, cycle.begin, cycle.end)]
    table = pl.concat(
        [
            pl.DataFrame(known, schema=schema, orient="row"),
            blocked.select(pl.lit(BLOCKED).alias("part"), *window),
            steps.select(pl.coalesce(step, pl.lit(WASTED)).alias("part"), *window),
        ]
    )
    edges = (
        table.select("part", pl.col(name).clip(cycle.begin, cycle.end).alias("at"), pl.lit(change).alias("change"))
        for name, change in (("start_ns", 1), ("end_ns", -1))
    )
    changes = (pl.col("change").filter(pl.col("part") == part).sum().alias(part) for part in layers)
    merged = pl.concat(edges).group_by("at").agg(*changes).sort("at")
    part = pl.coalesce(*(pl.when(pl.col(name).cum_sum() > 0).then(pl.lit(name)) for name in layers), pl.lit(OTHER))
    stretches = merged.select(part.alias("part"), start_ns="at", end_ns=pl.col("at").shift(-1)).drop_nulls()
    joined = stretches.group_by(pl.col("part").rle_id().alias("run"), maintain_order=True).agg(
        pl.col("part").first(), pl.col("start_ns").first(), pl.col("end_ns").last()
    )
    return joined.drop("run")
