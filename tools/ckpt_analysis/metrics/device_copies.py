"""Copies of saves from the device to the host: throughput by the device's clock, as a share of the bus's throughput."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import polars as pl

from ..model.frame import Frames


@dataclass(frozen=True)
class HostCopies:
    """Of one host: bytes of its ranks over the time in which any of them copied, and the sum of its ranks' buses."""

    host: str
    ranks: int
    bytes: int
    GBps: float
    bus_GBps: float | None


@dataclass(frozen=True)
class DeviceCopies:
    """Of one save: how fast the device copied, on the slowest and the median rank, and how much beside training.

    `bus_share` is the lowest of the ranks' shares of what their bus did as the process started; None: not measured.
    """

    ranks: int
    bytes: int
    device_s: float  # of the rank with the longest
    slowest_rank: int
    slowest_GBps: float
    median_GBps: float
    bus_share: float | None
    overlapped: float
    hosts: list[HostCopies]


def device_copies(frames: Frames, probes: pl.DataFrame, hosts: pl.DataFrame) -> dict[int, DeviceCopies]:
    """Group of a save -> its copies, of the saves that measured some.

    `probes` is what `probe_values` returns; `hosts` holds cycle, rank, host.
    """
    ends = probes.filter((pl.col("at") == "end") & pl.col("device_to_host_bytes").is_not_null())
    if ends.is_empty():
        return {}
    buses = probes.filter(pl.col("bus_to_host_bytes_per_s").is_not_null()).select(
        "cycle", "rank", bus="bus_to_host_bytes_per_s"
    )
    windows = (
        frames.spans_of(pl.col("operation") == "save", (pl.col("phase") == "device_to_host") & ~pl.col("blocking"))
        .group_by("group", "rank")
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    )
    table = (
        ends.join(buses, on=["cycle", "rank"], how="left")
        .join(hosts, on=["cycle", "rank"], how="left")
        .join(windows, on=["group", "rank"], how="inner")
        .with_columns(speed=pl.col("device_to_host_bytes") / pl.col("device_to_host_device_s"))
        .filter(pl.col("speed").is_finite() & (pl.col("device_to_host_bytes") > 0))
        .sort("group", "rank")
    )
    return {group: _of_save(rows) for (group,), rows in table.group_by("group", maintain_order=True)}  # type: ignore[misc]


def _of_save(rows: pl.DataFrame) -> DeviceCopies:
    speeds = rows["speed"].to_list()
    shares = rows.select(share=pl.col("speed") / pl.col("bus"))["share"].drop_nulls().to_list()
    total = sum(rows["device_to_host_bytes"].to_list())
    return DeviceCopies(
        ranks=rows.height,
        bytes=int(total),
        device_s=max(rows["device_to_host_device_s"]),
        slowest_rank=rows["rank"][speeds.index(min(speeds))],
        slowest_GBps=min(speeds) / 1e9,
        median_GBps=median(speeds) / 1e9,
        bus_share=min(shares, default=None),
        overlapped=sum(rows["device_to_host_before_release_bytes"].to_list()) / total,
        hosts=[_of_host(host, mine) for (host,), mine in rows.group_by("host", maintain_order=True)],
    )


def _of_host(host: object, rows: pl.DataFrame) -> HostCopies:
    num_bytes = int(rows["device_to_host_bytes"].sum())
    window_ns = max(rows["end_ns"]) - min(rows["start_ns"])
    known = rows["bus"].null_count() == 0
    return HostCopies(
        host=str(host),
        ranks=rows.height,
        bytes=num_bytes,
        GBps=num_bytes / max(window_ns, 1),
        bus_GBps=sum(rows["bus"].to_list()) / 1e9 if known else None,
    )
