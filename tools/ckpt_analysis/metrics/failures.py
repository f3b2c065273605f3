"""How a cycle ended: by a failure, as supervisors recorded it, or well, as its ranks did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from ..model.frame import Frames
from ..model.run_info import CycleInfo
from .results import FailureTimes, HostFailureTimes

_ENDED = (pl.col("operation") == "process") & (pl.col("phase") == "ended")


@dataclass(frozen=True)
class Failure:
    """A failure: when it was injected, or else detected (Unix ns), and what followed."""

    began_ns: int
    times: FailureTimes


@dataclass(frozen=True)
class CycleEnd:
    """How a cycle ended, as far as it is recorded."""

    failed: bool  # a supervisor recorded a failure, or a rank ended with an error
    open_ranks: int  # ranks whose trace has no end: they run, or were killed
    error: str | None = None  # of the first rank that ended with one: its number and the error

    @property
    def is_open(self) -> bool:
        return not self.failed and self.open_ranks > 0


def end_of(frames: Frames, info: CycleInfo) -> CycleEnd:
    """How the cycle ended. A rank without a trace is not counted."""
    ended = frames.events.filter(_ENDED & (pl.col("cycle") == info.cycle)).sort("time_ns")
    errors = ended.filter(pl.col("detail").is_not_null()).select("rank", "detail").rows()
    return CycleEnd(
        failed=info.cycle in failed_cycles(frames.events),
        open_ranks=info.present - ended["rank"].n_unique(),
        error=f"rank {errors[0][0]}: {errors[0][1]}" if errors else None,
    )


def failure_of(events: pl.DataFrame, cycle: int) -> Failure | None:
    """The failure that ended `cycle`: its last `injected` event and the first of each kind after it.

    Of several hosts the last one's `stopped` counts: no rank is started again before all have ended.
    If nobody injected it, the first `detected` event takes its place: a supervisor that only watches, as hooks in
    torchrun's agent, knows no earlier time. None if no supervisor recorded one (a job killed by hand).
    """
    mine = events.filter((pl.col("operation") == "failure") & (pl.col("cycle") == cycle)).sort("time_ns").to_dicts()
    injected, detected = ([one for one in mine if one["phase"] == phase] for phase in ("injected", "detected"))
    if not injected and not detected:
        return None
    first = injected[-1] if injected else detected[0]
    began_ns = first["time_ns"]
    later = [one for one in mine if one["time_ns"] >= began_ns]
    names = dict.fromkeys(one["host"] for one in later if one["host"] is not None)
    hosts = tuple(_on_host(later, host, began_ns) for host in names)
    relaunched = _first(later, "relaunched", began_ns)
    return Failure(
        began_ns,
        FailureTimes(
            fault=first["detail"],
            detected_s=_first(later, "detected", began_ns),
            stopped_s=_stopped(hosts, relaunched) if len(hosts) > 1 else _first(later, "stopped", began_ns),
            relaunched_s=relaunched,
            hosts=hosts if len(hosts) > 1 else (),
        ),
    )


def failed_cycles(events: pl.DataFrame) -> set[int]:
    """Cycles of which a supervisor recorded a failure, or that a rank ended with an error."""
    seen = (pl.col("operation") == "failure") & pl.col("phase").is_in(["injected", "detected"])
    return set(events.filter(seen | (_ENDED & pl.col("detail").is_not_null()))["cycle"].to_list())


def clean_ends(frames: Frames, world_sizes: Mapping[int, int]) -> dict[int, int]:
    """cycle -> Unix ns of its end, of cycles in which every rank ended by itself, without an error.

    `world_sizes`: cycle -> ranks that were launched. How a rank without a trace ended is unknown.
    """
    ended = frames.events.filter(_ENDED)
    well = pl.col("detail").is_null().all().alias("well")
    of_cycle = ended.group_by("cycle").agg(pl.col("rank").n_unique().alias("ended"), well, pl.col("time_ns").max())
    clean = of_cycle.filter(pl.col("well"))
    return {
        cycle: time_ns
        for cycle, ranks, time_ns in clean.select("cycle", "ended", "time_ns").iter_rows()
        if ranks == world_sizes[cycle]
    }


def _first(events: Sequence[Mapping[str, Any]], phase: str, began_ns: int) -> float | None:
    """Seconds from `began_ns` to the first event of a phase."""
    return next(((event["time_ns"] - began_ns) / 1e9 for event in events if event["phase"] == phase), None)


def _on_host(events: Sequence[Mapping[str, Any]], host: str, began_ns: int) -> HostFailureTimes:
    mine = [event for event in events if event["host"] == host]
    return HostFailureTimes(host, *(_first(mine, phase, began_ns) for phase in ("detected", "stopped", "relaunched")))


def _stopped(hosts: tuple[HostFailureTimes, ...], relaunched: float | None) -> float | None:
    """When the last host had stopped its ranks. One that was cut off may do so after the others were started again."""
    times = [host.stopped_s for host in hosts if host.stopped_s is not None]
    if not times or relaunched is None:
        return max(times, default=None)
    return min(max(times), relaunched)
