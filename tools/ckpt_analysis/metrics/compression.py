"""Saves whose files are compressed (--checkpoint-compression): what was compressed, into what, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from ..model.frame import Frames


@dataclass(frozen=True)
class Compression:
    """Files of one save. `bytes`: of the ranks that have compressed theirs, before that; `stored_bytes`: after it.

    `compress_s`: processor time of it, of all these ranks.
    """

    ranks: int
    bytes: int
    stored_bytes: int
    compress_s: float


def compressions(frames: Frames, probes: pl.DataFrame) -> dict[int, Compression]:
    """Group of a save -> its compression, of the saves that had any. `probes` is what `probe_values` returns."""
    measured = probes.filter((pl.col("at") == "end") & pl.col("original_bytes").is_not_null())
    stored = frames.operations.filter(pl.col("operation") == "save").select("group", "rank", "bytes").drop_nulls()
    table = (
        measured.join(stored, on=["group", "rank"], how="inner")
        .group_by("group")
        .agg(pl.len().alias("ranks"), pl.col("original_bytes", "bytes", "compress_s").sum())
    )
    return {
        row["group"]: Compression(row["ranks"], int(row["original_bytes"]), int(row["bytes"]), row["compress_s"])
        for row in table.iter_rows(named=True)
    }
