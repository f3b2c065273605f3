"""The rule on reads that were served by the page cache instead of the storage."""

from __future__ import annotations

import polars as pl

from ...common.formatting import rate, size
from .evidence import Evidence, name_of
from .rule import Observation, Thresholds


def page_cache_reads(e: Evidence, limits: Thresholds) -> list[Observation]:
    """The newest load of which the kernel read only a part from storage, by its counter per process.

    Nothing is reported if the counter was not sampled.
    """
    fetched = _fetched(e)
    loads = [load for load in e.loads if load.outcome == "ok" and load.group in fetched]
    if not loads:
        return []
    load = loads[-1]
    from_storage, read = fetched[load.group]
    if read < limits["least_bytes"] or from_storage >= limits["share"] * read:
        return []
    return [
        Observation(
            title=f"The {rate(load.io_GBps)} GB/s of a load are not those of the storage",
            evidence=f"{name_of('load', load)}: its ranks read {size(read)} of files, of which the kernel fetched "
            f"{size(from_storage)} from storage while they loaded; the rest came out of the page cache (or the "
            "file system does not count its reads, as in memory or with some network clients)",
            cost_s=0.0,
            data={"cycle": load.cycle, "read_bytes": read, "storage_bytes": from_storage},
        )
    ]


def _fetched(e: Evidence) -> dict[int, tuple[int, int]]:
    """group of a load -> (bytes read from storage, bytes loaded), over the ranks for which both are known."""
    counter = pl.col("io_read_storage_bytes")
    rises = (
        e.probes.filter((pl.col("operation") == "load") & counter.is_not_null())
        .group_by("group", "rank")
        .agg(pl.len().alias("samples"), (counter.max() - counter.min()).alias("fetched"))
        .filter(pl.col("samples") == 2)
    )
    loaded = e.frames.operations.select("group", "rank", "bytes").drop_nulls()
    sums = (
        rises.join(loaded, on=["group", "rank"])
        .group_by("group")
        .agg(pl.col("fetched").sum().cast(pl.Int64), pl.col("bytes").sum())
    )
    return {group: (fetched, num_bytes) for group, fetched, num_bytes in sums.iter_rows()}
