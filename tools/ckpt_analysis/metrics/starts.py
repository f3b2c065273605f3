"""Starts of cycles: from process start, or from the failure, to the first step, and the work lost before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from ..common.intervals import pieces
from ..model.frame import Frames
from ..model.startup_spans import as_details, startup_spans
from .critical_rank import critical_ranks_of_starts
from .failures import clean_ends, failure_of
from .lost_work import lost_work_s, reached_step, repeated_losses
from .phases import phase_seconds
from .rank_totals import finished_spreads, join_totals, own_time, rank_busy, stats_over_ranks
from .results import StartStats
from .steps_seen import StepsSeen
from .volumes import Volumes, volume_parts, volumes


@dataclass(frozen=True)
class StartTimes:
    """Every rank's part of all starts, in ns, as `RankTimes`; and the rows that it was measured from.

    startups  `Frames.startups`
    loads     `Frames.startup_loads`

    `last_records`: cycle -> time of the last record of a rank in it, Unix ns.
    `clean_ends`: cycle -> Unix ns of its end, where every rank is known to have ended well.
    """

    startups: pl.DataFrame
    loads: pl.DataFrame
    seconds: pl.DataFrame
    totals: pl.DataFrame
    moved: Volumes
    last_records: dict[int, int]
    clean_ends: dict[int, int]


def start_times(frames: Frames, world_sizes: Mapping[int, int]) -> StartTimes:
    """Measure every rank in the start of every cycle that recorded one. `world_sizes`: cycle -> ranks launched."""
    startups, loads = frames.startups, frames.startup_loads
    phase_spans, of_loads = startup_spans(frames)
    # Catching up happens after the first step, so it is no part of the time up to it.
    named = phase_spans.filter(pl.col("detail").is_not_null())
    seconds = phase_seconds(phase_spans, pl.concat([named, as_details(of_loads)]))
    parts = rank_busy(phase_spans.filter(pl.col("phase") != "caught_up"))
    totals = join_totals(startups, parts.join(own_time(seconds), on=["group", "rank"], how="left"))
    moved, clean = _moved(phase_spans, of_loads), clean_ends(frames, world_sizes)
    return StartTimes(startups, loads, seconds, totals, moved, _last_records(frames), clean)


def _moved(phase_spans: pl.DataFrame, of_loads: pl.DataFrame) -> Volumes:
    """Volumes of the phases of starts, and of the loads' phases as details of the phase "load".

    A phase of a load counts bytes that pass through several of its own details (read, then verified) once.
    """
    parts, load_parts = volume_parts(phase_spans), volume_parts(of_loads)
    inside = {
        (group, "load", phase): volume
        for (group, phase, detail), volume in volumes(load_parts, load_parts).items()
        if not detail
    }
    return volumes(parts, parts) | inside


def measure_starts(frames: Frames, times: StartTimes, steps: StepsSeen, *, per_rank: bool) -> list[StartStats]:
    """Statistics of the start of every cycle that recorded one, in order."""
    startups = times.startups
    if startups.is_empty():
        return []
    critical = critical_ranks_of_starts(frames)
    spreads = finished_spreads(times.totals, critical)
    over_ranks = stats_over_ranks(
        times.seconds, times.totals, times.moved, critical, spreads, "startup", per_rank=per_rank
    )
    results = []
    for group in sorted(startups["group"].unique()):
        mine = startups.filter(pl.col("group") == group)
        loads = times.loads.filter(pl.col("startup") == group)
        around = _circumstances(frames, mine, loads, times, steps)
        ends = dict(mine.select("rank", "end_ns").iter_rows())
        around["after_critical_s"] = _seconds(ends.get(over_ranks[group]["critical_rank"]), mine["end_ns"].max())
        around["last_first_step_s"] = _last_first_step(mine, times.seconds.filter(pl.col("group") == group))
        results.append(StartStats(**over_ranks[group], **around))
    return results


def _last_first_step(startups: pl.DataFrame, seconds: pl.DataFrame) -> float | None:
    """How long the first step took on the rank whose start ended last."""
    last = startups.drop_nulls("end_ns").sort("end_ns").tail(1).select("rank")
    whole = (pl.col("phase") == "first_step") & (pl.col("detail") == "")
    found = seconds.filter(whole).join(last, on="rank")["busy_ns"]
    return found[0] / 1e9 if found.len() else None


def _circumstances(
    frames: Frames, startups: pl.DataFrame, loads: pl.DataFrame, start_times: StartTimes, steps: StepsSeen
) -> dict[str, Any]:
    """What happened around one start: the fields of StartStats that are not statistics over ranks."""
    cycle: int = startups["cycle"][0]
    # A load that found no checkpoint also ends well.
    something = (pl.col("bytes") > 0) | (pl.col("bytes").is_null() & pl.col("tag").is_not_null())
    loaded = loads.filter((pl.col("outcome") == "ok") & something)
    # Weights that torch.load reads at a start need not be of this run.
    is_restart = cycle > 0 or not loaded.filter(~pl.col("inferred")).is_empty()
    resumed = _resumed_step(frames, loaded, cycle) if steps.numbered else None
    with_steps: Any = frames.iterations.filter(pl.col("cycle") < cycle)["cycle"].max()
    known = steps.are_known(range(0 if with_steps is None else with_steps + 1, cycle))
    reached = reached_step(frames.iterations, cycle) if known else None
    lost_steps = lost_s = None
    if is_restart and resumed is not None and reached is not None:
        lost_steps = max(0, reached - resumed)
        lost_s = lost_work_s(frames.iterations, cycle, resumed, reached)
    caught_up = frames.spans_of(pl.col("cycle") == cycle, pl.col("phase") == "caught_up")
    times = caught_up.select("rank", "end_ns").join(startups.select("rank", "start_ns"), on="rank")
    repeated = repeated_losses(frames.iterations, cycle) if steps.are_known(range(cycle + 1)) else None
    failure = failure_of(frames.events, cycle - 1)
    newest = max((earlier for earlier in start_times.last_records if earlier < cycle), default=-1)
    unknown = newest in start_times.clean_ends or any(newest < missing < cycle for missing in steps.missing)
    was_down_ns = None if unknown else start_times.last_records.get(newest)
    down_s = _seconds(was_down_ns, startups["start_ns"].min())
    return {
        "cycle": cycle,
        "ranks": startups.height,
        "finished_ranks": startups["end_ns"].count(),
        "is_restart": is_restart,
        "steps_observed": cycle not in steps.blind,
        "resumed_step": resumed,
        "reached_step": reached,
        "lost_steps": lost_steps,
        "lost_work_s": lost_s,
        "repeated_steps": None if repeated is None else repeated.height,
        "equal_losses": None if repeated is None else repeated.filter(pl.col("loss") == pl.col("loss_before")).height,
        "down_s": down_s and max(down_s, 0.0),  # a rank that returns has begun before the last record
        "restart_s": _seconds(failure and failure.began_ns, startups["end_ns"].max()),
        "caught_up_s": _seconds(0, (times["end_ns"] - times["start_ns"]).max()),
        "failure_to_caught_up_s": _seconds(failure and failure.began_ns, times["end_ns"].max()),
        "failure": failure and failure.times,
        "return_s": _return_s(frames, startups["group"][0]),
    }


def _return_s(frames: Frames, group: int) -> float | None:
    """Of the rank where it was longest: from the begin of its abort until it waited for the next start."""
    left = (pl.col("phase") == "abort") | (pl.col("detail") == "undo")
    of_ranks = frames.spans_of(pl.col("group") == group, left).group_by("rank").agg(pl.col("duration_ns").sum())
    return _seconds(0, of_ranks["duration_ns"].max())


def _resumed_step(frames: Frames, loaded: pl.DataFrame, cycle: int) -> int | None:
    """Step of the checkpoint loaded, else the one before the cycle's first iteration; 0 is a fresh start."""
    steps = loaded["step"].drop_nulls()
    if not steps.is_empty():
        return int(steps.mode().sort()[0])
    first = frames.iterations.filter(pl.col("cycle") == cycle)["step"].min()
    return None if first is None else int(str(first)) - 1


def _last_records(frames: Frames) -> dict[int, int]:
    """Time of the last record of a rank in each cycle that has one (Unix ns)."""
    spans = (frames.placed(piece.select("op", "end_ns"), "cycle") for piece in pieces(frames.spans))
    # A process that was killed within its first span has recorded the begin of its start-up alone.
    begun = frames.operations.select("cycle", end_ns="start_ns")
    ended = frames.events.filter(pl.col("operation") == "process").select("cycle", end_ns="time_ns")
    recorded = (begun, frames.operations, *spans, frames.iterations, ended)
    moments = pl.concat(frame.group_by("cycle").agg(pl.col("end_ns").max()) for frame in recorded).drop_nulls()
    return dict(moments.group_by("cycle").agg(pl.col("end_ns").max()).iter_rows())


def _seconds(start_ns: int | None, end_ns: object) -> float | None:
    if start_ns is None or not isinstance(end_ns, int):
        return None
    return (end_ns - start_ns) / 1e9
