"""What supervisors saw of the failure that ended a cycle."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from .results import FailureTimes


@dataclass(frozen=True)
class Failure:
    """A failure: when it was injected, or else detected (Unix ns), and what followed."""

    began_ns: int
    times: FailureTimes


def failure_of(events: pl.DataFrame, cycle: int) -> Failure | None:
    """The failure that ended `cycle`: its last `injected` event and the first of each kind after it.

    If nobody injected it, the first `detected` event takes its place: a supervisor that only watches, as hooks in
    torchrun's agent, knows no earlier moment. None if no supervisor recorded one (a job killed by hand).
    """
    mine = events.filter((pl.col("operation") == "failure") & (pl.col("cycle") == cycle)).sort("time_ns")
    first = mine.filter(pl.col("phase") == "injected").tail(1)
    if first.is_empty():
        first = mine.filter(pl.col("phase") == "detected").head(1)
    if first.is_empty():
        return None
    moment = first["time_ns"].item()
    later = mine.filter(pl.col("time_ns") >= moment)

    def since(phase: str) -> float | None:
        times = later.filter(pl.col("phase") == phase)["time_ns"]
        return None if times.is_empty() else (times[0] - moment) / 1e9

    times = FailureTimes(first["detail"].item(), since("detected"), since("stopped"), since("relaunched"))
    return Failure(moment, times)
