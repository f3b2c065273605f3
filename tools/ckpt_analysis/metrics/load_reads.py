"""Bytes that a load asked its storage for, in all and by host, against those of the checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import polars as pl

from restart_trace.schema import STORAGE

from ..model.frame import Frames


@dataclass(frozen=True)
class HostReads:
    """What the ranks of one host asked for. `storage_bytes`: of these the kernel fetched from its storage."""

    host: str
    ranks: int
    bytes: int
    storage_bytes: int | None  # None: not sampled on all of these ranks


@dataclass(frozen=True)
class LoadReads:
    """`checkpoint_bytes`: of all its files. `amplification`: `bytes`, which all ranks asked for, over those."""

    checkpoint_bytes: int
    bytes: int
    amplification: float
    hosts: list[HostReads]


def load_reads(
    frames: Frames, probes: pl.DataFrame, hosts: pl.DataFrame, lacking: Collection[int]
) -> dict[int, LoadReads]:
    """Group of a load -> what it asked for, of the loads from storage that recorded the size of their checkpoint.

    Of a load that downloads, downloads count; of others, reads, if every rank has recorded some: what a rank does not
    tell is not nothing. Loads that a rank did not finish, or not from storage, are left out. `probes` is what
    `probe_values` returns; `hosts` holds cycle, rank, host; `lacking` are groups that lack a rank.
    """
    sizes = probes.filter((pl.col("operation") == "load") & (pl.col("checkpoint_bytes") > 0))
    if sizes.is_empty():
        return {}
    fetched = pl.col("io_read_storage_bytes")
    rises = probes.group_by("group", "rank").agg(
        pl.when(fetched.count() == 2).then(fetched.max() - fetched.min()).alias("fetched")
    )
    tier = pl.col("tier").cast(pl.String)
    whole = (pl.col("end_ns").is_not_null() & (tier.is_null() | (tier == STORAGE))).all().over("group")
    table = (
        frames.operations.filter(whole & ~pl.col("group").is_in(list(lacking)))
        .select("group", "cycle", "rank")
        .join(sizes.group_by("group").agg(pl.col("checkpoint_bytes").max()), on="group", how="inner")
        .join(_asked(frames), on=["group", "rank"], how="left")
        .join(rises, on=["group", "rank"], how="left")
        .join(hosts.with_columns(pl.col("cycle", "rank").cast(pl.Int64)), on=["cycle", "rank"], how="left")
        .group_by("group", "host")
        .agg(
            pl.col("checkpoint_bytes").first().cast(pl.Int64),
            pl.len().alias("ranks"),
            pl.col("asked").sum(),
            pl.col("asked").is_not_null().all().alias("told"),
            pl.col("downloads").any(),
            pl.when(pl.col("fetched").is_not_null().all()).then(pl.col("fetched").sum()).cast(pl.Int64),
        )
        .sort("group", "host")
        .filter((pl.col("told").all() | pl.col("downloads").any()).over("group"))
    )
    return {group: _of_load(rows) for (group,), rows in table.group_by("group", maintain_order=True)}  # type: ignore[misc]


def _asked(frames: Frames) -> pl.DataFrame:
    """group, rank, asked: bytes; downloads: whether the load downloads."""
    part = pl.col("detail").cast(pl.String).is_in(["read", "download"]) & (pl.col("bytes") > 0)
    spans = frames.spans_of(pl.col("operation") == "load", part).with_columns(pl.col("detail").cast(pl.String))
    downloads = (pl.col("detail") == "download").any().over("group")
    counted = spans.filter((pl.col("detail") == "download") | ~downloads)
    return counted.group_by("group", "rank").agg(
        pl.col("bytes").sum().alias("asked"), (pl.col("detail") == "download").any().alias("downloads")
    )


def _of_load(rows: pl.DataFrame) -> LoadReads:
    hosts = [
        HostReads(str(row["host"]), row["ranks"], int(row["asked"]), row["fetched"])
        for row in rows.iter_rows(named=True)
    ]
    size, asked = rows["checkpoint_bytes"][0], sum(host.bytes for host in hosts)
    return LoadReads(size, asked, asked / size, hosts)
