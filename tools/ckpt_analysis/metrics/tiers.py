"""Engine `memory` (docs/peers.md): bytes of loads by their tier, and copies of saves to other hosts."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from restart_trace.schema import LOCAL_MEMORY, PEER, STORAGE

from ..model.frame import Frames

NEAREST_FIRST = (LOCAL_MEMORY, PEER, STORAGE)


@dataclass(frozen=True)
class TierRead:
    """What the ranks of one host read from one tier. `seconds`: of the rank that read longest; None: no span of it."""

    tier: str
    host: str
    ranks: list[int]
    bytes: int
    seconds: float | None


@dataclass(frozen=True)
class Replication:
    """Copies of one save on their way to other hosts. `seconds`: of the rank whose copies took longest.

    `waited_s`: for which its copies were held back, of the rank with the longest, and `at_once_bytes`: of all ranks,
    sent whatever training did; both only where copies keep to idle times of the network, else None.
    `wire_bytes`: of all ranks, as they were sent, and `compress_s`: processor time to compress `bytes`; both only where
    copies are compressed, else None.
    """

    ranks: int
    bytes: int
    seconds: float
    slowest_rank: int
    waited_s: float | None
    at_once_bytes: int | None
    wire_bytes: int | None = None
    compress_s: float | None = None

    @property
    def sent_bytes(self) -> int:
        """Bytes that the network has carried."""
        return self.bytes if self.wire_bytes is None else self.wire_bytes


def tier_reads(frames: Frames, seconds: pl.DataFrame, hosts: pl.DataFrame) -> dict[int, list[TierRead]]:
    """Group of a load -> what each host read from each tier, nearest tier first; of loads that name tiers.

    A rank counts for the tier that it read in the end. From a peer that is what it downloaded, from the others what it
    read. `seconds` are those of operations.RankTimes; `hosts` holds cycle, rank, host.
    """
    loads = frames.operations.filter((pl.col("operation") == "load") & pl.col("tier").is_not_null())
    if loads.is_empty():
        return {}
    how = pl.when(pl.col("tier") == PEER).then(pl.lit("download")).otherwise(pl.lit("read"))
    key = ["group", "rank", "detail"]
    part = pl.col("phase").cast(pl.String) == "load"
    spans = frames.spans_of(pl.col("operation") == "load", part).with_columns(pl.col("detail").cast(pl.String))
    took = seconds.filter(part).with_columns(pl.col("detail").cast(pl.String)).select(*key, "busy_ns")
    table = (
        loads.select("group", "cycle", "rank", "tier", detail=how)
        .join(hosts.with_columns(pl.col("cycle", "rank").cast(pl.Int64)), on=["cycle", "rank"], how="left")
        .join(spans.group_by(key).agg(pl.col("bytes").sum()), on=key, how="left")
        .join(took, on=key, how="left")
        .group_by("group", "tier", "host")
        .agg(pl.col("rank").unique().sort(), pl.col("bytes").sum(), pl.col("busy_ns").max())
        .sort(pl.col("tier").replace_strict({tier: i for i, tier in enumerate(NEAREST_FIRST)}, default=9), "host")
    )
    found: dict[int, list[TierRead]] = {}
    for row in table.iter_rows(named=True):
        took_s = None if row["busy_ns"] is None else row["busy_ns"] / 1e9
        read = TierRead(row["tier"], str(row["host"]), row["rank"], int(row["bytes"] or 0), took_s)
        found.setdefault(row["group"], []).append(read)
    return found


def replications(frames: Frames, probes: pl.DataFrame) -> dict[int, Replication]:
    """Group of a save -> its copies, of the saves that had any. `probes` is what `probe_values` returns."""
    spans = frames.spans_of(pl.col("operation") == "save", pl.col("phase").cast(pl.String) == "replicate")
    if spans.is_empty():
        return {}
    names = [f"replicate_{name}" for name in ("waited_s", "at_once_bytes", "wire_bytes", "compress_s")]
    replication = probes.filter(pl.col("at") == "end").select("group", "rank", *names)
    ranks = spans.group_by("group", "rank").agg(pl.col("bytes").sum(), pl.col("duration_ns").sum())
    found = {}
    rows = ranks.join(replication, on=["group", "rank"], how="left").sort("group", "duration_ns", "rank")
    for (group,), mine in rows.group_by("group", maintain_order=True):
        waited, at_once, wire, compress = (mine[name].drop_nulls() for name in names)
        found[group] = Replication(
            ranks=mine.height,
            bytes=int(mine["bytes"].sum()),
            seconds=mine["duration_ns"][-1] / 1e9,
            slowest_rank=mine["rank"][-1],
            waited_s=None if waited.is_empty() else float(waited.max()),  # type: ignore[arg-type]
            at_once_bytes=None if at_once.is_empty() else int(at_once.sum()),
            wire_bytes=None if wire.is_empty() else int(wire.sum()),
            compress_s=None if compress.is_empty() else float(compress.sum()),
        )
    return found
