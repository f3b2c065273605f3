"""Requests of saves and loads to object storage, as the client counted them."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from ..model.frame import Frames

# Up to so many bytes an object goes or comes in one request (megatron/fileio/objects/parts.py).
ONE_REQUEST_BYTES = 8 << 20
_COUNTED = (
    "objects", "bytes", "window_ns", "small_objects", "small_ns",
    "store_requests", "store_retries", "store_throttled", "store_request_s",
)  # fmt: skip


@dataclass(frozen=True)
class StoreTraffic:
    """Of one save or load. `window_s`: from a rank's first object's begin to its last one's end, where that is longest.

    `success`: share of the requests that were not repeated. `connections`: requests under way on average while a rank
    had objects under way, on the rank with the fewest, `connections_rank`. `small_objects` have one request's bytes at
    most; `small_s` is what `small_rank`, the one with the longest, spent on those.
    """

    ranks: int
    objects: int
    bytes: int
    window_s: float
    requests: int
    retries: int
    throttled: int
    requests_per_s: float
    success: float
    connections: float
    connections_rank: int
    small_objects: int
    small_s: float
    small_rank: int


def store_traffic(frames: Frames, probes: pl.DataFrame) -> dict[int, StoreTraffic]:
    """Group of a save or load -> what it asked of the store, if anything. `probes` is what `probe_values` returns."""
    counted = probes.filter((pl.col("at") == "end") & (pl.col("store_requests") > 0))
    if counted.is_empty():
        return {}
    small = pl.col("bytes") <= ONE_REQUEST_BYTES
    objects = (
        frames.spans_of(
            what=pl.col("detail").cast(pl.String).is_in(["upload", "download"])
            & ((pl.col("bytes") > 0) | pl.col("error").is_not_null())
        )
        .group_by("group", "rank")
        .agg(
            pl.len().alias("objects"),
            pl.col("bytes").sum(),
            (pl.col("end_ns").max() - pl.col("start_ns").min()).alias("window_ns"),
            small.sum().alias("small_objects"),
            pl.col("duration_ns").filter(small).sum().alias("small_ns"),
        )
    )
    ranks = counted.join(objects, on=["group", "rank"]).filter(pl.col("window_ns") > 0).sort("group", "rank")
    return {group: _of_operation(rows) for (group,), rows in ranks.group_by("group", maintain_order=True)}  # type: ignore[misc]


def _of_operation(rows: pl.DataFrame) -> StoreTraffic:
    columns: dict[str, list[float]] = rows.select("rank", *_COUNTED).to_dict(as_series=False)
    requests, retries = sum(columns["store_requests"]), sum(columns["store_retries"])
    window_s = max(columns["window_ns"]) / 1e9
    windows = zip(columns["store_request_s"], columns["window_ns"], strict=True)
    at_once = [1e9 * of_requests_s / window_ns for of_requests_s, window_ns in windows]
    return StoreTraffic(
        ranks=rows.height,
        objects=int(sum(columns["objects"])),
        bytes=int(sum(columns["bytes"])),
        window_s=window_s,
        requests=int(requests),
        retries=int(retries),
        throttled=int(sum(columns["store_throttled"])),
        requests_per_s=requests / window_s,
        success=1 - retries / requests,
        connections=min(at_once),
        connections_rank=int(columns["rank"][at_once.index(min(at_once))]),
        small_objects=int(sum(columns["small_objects"])),
        small_s=max(columns["small_ns"]) / 1e9,
        small_rank=int(columns["rank"][columns["small_ns"].index(max(columns["small_ns"]))]),
    )
