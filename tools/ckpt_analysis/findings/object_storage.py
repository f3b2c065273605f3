"""Rules on saves to and loads from object storage: throttling, small objects, a single connection."""

from __future__ import annotations

from collections.abc import Callable

from ...common.formatting import percent, plural, rate, seconds
from ..metrics.results import OperationStats
from ..metrics.store_traffic import StoreTraffic
from .evidence import Evidence, name_of
from .rule import Observation, Thresholds


def store_throttled(e: Evidence, limits: Thresholds) -> list[Observation]:
    """For each kind the operation with the largest share of throttled requests."""
    found = []
    for kind, stats, traffic in _worst(e, lambda traffic: traffic.throttled / traffic.requests):
        share = traffic.throttled / traffic.requests
        if share < limits["share"]:
            continue
        found.append(
            Observation(
                title=f"The store told {percent(share)} of the requests of a {kind} to slow down",
                evidence=f"{name_of(kind, stats)}: {traffic.throttled} of {plural(traffic.requests, 'request')}, at "
                f"{rate(traffic.requests_per_s)} requests/s of {plural(traffic.ranks, 'rank')}; they were repeated "
                "after pauses, which no phase tells apart",
                cost_s=0.0,
                data={"operation": kind, "cycle": stats.cycle, "throttled": traffic.throttled, "share": share},
            )
        )
    return found


def store_small_objects(e: Evidence, limits: Thresholds) -> list[Observation]:
    """For each kind the operation in which a rank spends the most time on objects of one request."""
    found = []
    for kind, stats, traffic in _worst(e, lambda traffic: traffic.small_s):
        few = traffic.small_objects < limits["least_objects"] * traffic.ranks
        if few or traffic.small_objects < limits["share"] * traffic.objects or traffic.small_s < limits["least_s"]:
            continue
        found.append(
            Observation(
                title=f"{traffic.small_objects} of the {traffic.objects} objects of a {kind} take one request each",
                evidence=f"{name_of(kind, stats)}: rank {traffic.small_rank} spends {seconds(traffic.small_s)} s on "
                f"objects of at most 8 MiB, which go one after the other",
                cost_s=traffic.small_s,
                data={
                    "operation": kind, "cycle": stats.cycle, "objects": traffic.objects, "small": traffic.small_objects,
                    "rank": traffic.small_rank,
                },
            )
        )  # fmt: skip
    return found


def store_one_connection(e: Evidence, limits: Thresholds) -> list[Observation]:
    """For each kind the operation in which a rank has hardly more than one request in flight for the longest time."""
    found = []
    for kind, stats, traffic in _worst(e, lambda traffic: -traffic.connections):
        fast = traffic.connections >= limits["connections"] or traffic.window_s < limits["least_s"]
        if fast or not traffic.bytes:  # a save of which nothing arrived says nothing of connections
            continue
        found.append(
            Observation(
                title=f"A {kind} has {rate(traffic.connections)} requests under way at once",
                evidence=f"{name_of(kind, stats)}: on rank {traffic.connections_rank}, on average while its objects "
                f"were under way, for up to {seconds(traffic.window_s)} s; of {plural(traffic.objects, 'object')} "
                f"{traffic.small_objects} take one request each. One connection's speed is the limit",
                cost_s=traffic.window_s,
                data={
                    "operation": kind, "cycle": stats.cycle, "connections": traffic.connections,
                    "rank": traffic.connections_rank,
                },
            )
        )  # fmt: skip
    return found


def _worst(e: Evidence, badness: Callable[[StoreTraffic], float]) -> list[tuple[str, OperationStats, StoreTraffic]]:
    """For each kind, save and load, the worst operation: (kind, operation, its traffic)."""
    found = []
    for kind, operations in (("save", e.saves), ("load", e.loads)):
        known = [(kind, stats, stats.store_traffic) for stats in operations if stats.store_traffic is not None]
        if known:
            found.append(max(known, key=lambda one: badness(one[2])))
    return found
