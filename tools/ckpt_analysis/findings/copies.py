"""Rules on saves in host memory: copies that are missing, that training waited for, or that could not be used."""

from __future__ import annotations

import polars as pl

from restart_trace.schema import STORAGE

from ...common.formatting import percent, plural, seconds, size
from ..common.problems import number_list
from .evidence import Evidence, name_of
from .rule import Observation, Thresholds

COPY_MISSING, COPY_REJECTED = "copy_missing", "copy_rejected"  # events of the trainer


def missing_copies(e: Evidence, limits: Thresholds) -> list[Observation]:
    """Saves of which a host has no copy though it should."""
    events = e.frames.events.filter((pl.col("operation") == "save") & (pl.col("phase") == COPY_MISSING))
    if events.is_empty():
        return []
    saves = events.select("cycle", "step").unique().height
    last = events.sort("time_ns").row(-1, named=True)
    cost = max((save.replication.seconds for save in e.saves if save.replication), default=0.0)
    return [
        Observation(
            title=f"{plural(saves, 'save')} had no copy on another host",
            evidence=f"{_copies(events.height)} failed, the last of rank {last['rank']} at step "
            f"{last['step']}: {last['detail']}",
            cost_s=cost,
            data={"operation": "save", "saves": saves, "copies": events.height, "rank": last["rank"]},
        )
    ]


def late_copies(e: Evidence, limits: Thresholds) -> list[Observation]:
    """Copies that should have been sent while the network was idle, but were sent while training waited for them."""
    replicated = [(save, save.replication) for save in e.saves if save.replication and save.replication.bytes]
    late = [(s, sent) for s, sent in replicated if (sent.at_once_bytes or 0) >= limits["share"] * sent.sent_bytes]
    if len(late) < limits["least_saves"]:
        return []
    save, sent = max(late, key=lambda found: found[1].at_once_bytes or 0)
    at_once, of = sent.at_once_bytes or 0, sent.sent_bytes
    return [
        Observation(
            title=f"Training waited for copies of {len(late)} of {plural(len(replicated), 'save')}",
            evidence=f"{name_of('save', save)}: {size(at_once)} of {size(of)} "
            f"({percent(at_once / of)}) went at once, as steps had left no idle time for them; copies took "
            f"rank {sent.slowest_rank} {seconds(sent.seconds)} s",
            cost_s=sent.seconds * at_once / of,
            data={"operation": "save", "saves": len(late), "at_once_bytes": at_once, "bytes": of},
        )
    ]


def read_from_storage(e: Evidence, limits: Thresholds) -> list[Observation]:
    """Restarts of a run with saves in memory whose ranks nevertheless read storage."""
    # The first cycle of a trace loads what an earlier launch has saved, so it is left out.
    resumed = {start.cycle for start in e.starts if start.is_restart} - {min((s.cycle for s in e.starts), default=0)}
    found = []
    for load in e.loads:
        read = [tier for tier in load.tiers if tier.tier == STORAGE]
        if load.cycle not in resumed or load.outcome != "ok" or load.bytes == 0 or not read:
            continue
        took = max((tier.seconds or 0.0 for tier in read), default=0.0)
        hosts = ", ".join(tier.host for tier in read[:8])
        found.append(
            Observation(
                title=f"The restart of cycle {load.cycle} read {size(sum(tier.bytes for tier in read))} from storage",
                evidence=f"{name_of('load', load)}: no save in memory was complete for every rank; the ranks of "
                f"{hosts} read for {seconds(took)} s at most",
                cost_s=took,
                data={"operation": "load", "cycle": load.cycle, "hosts": [tier.host for tier in read]},
            )
        )
    return found


def rejected_copies(e: Evidence, limits: Thresholds) -> list[Observation]:
    """Copies that a load found damaged or could not fetch."""
    events = e.frames.events.filter((pl.col("operation") == "load") & (pl.col("phase") == COPY_REJECTED))
    if events.is_empty():
        return []
    ranks = events["rank"].unique().sort().to_list()
    first = events.sort("time_ns", "rank").row(0, named=True)
    return [
        Observation(
            title=f"{_copies(events.height)} of saves in memory could not be used",
            evidence=f"cycle {first['cycle']}, rank {number_list(ranks)} went on to the next copy; the first of rank "
            f"{first['rank']}: {first['detail']}",
            cost_s=0.0,
            data={"operation": "load", "copies": events.height, "ranks": ranks},
        )
    ]


def _copies(number: int) -> str:
    return "1 copy" if number == 1 else f"{number} copies"
