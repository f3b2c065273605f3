"""Bytes and files of each phase, and whether its spans blocked training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from ..common.intervals import pieces
from ..common.names import NAME

_KEY = ["group", "phase", "detail"]


@dataclass(frozen=True)
class Volume:
    """What the spans of one phase or detail moved; None is what none of them counted."""

    bytes: int | None
    num_files: int | None
    blocking: str  # "all", "some" or "none" of them were waited for by the training thread


Volumes = dict[tuple[int, str, str], Volume]  # by group, phase, detail; the detail is "" for the phase as a whole


@dataclass(frozen=True)
class VolumeParts:
    """Of some ranks. `sums`: group, phase, detail, bytes, counted, all, any. `files`: group, phase, detail, files.

    The detail is null where spans name none; in `files` "" stands for the phase as a whole.
    """

    sums: pl.DataFrame
    files: pl.DataFrame


def volume_parts(spans: pl.DataFrame) -> VolumeParts:
    """Parts of spans; those of one rank's operation must all be among them, or its files count twice."""
    return add_parts([_parts(piece) for piece in pieces(spans)])


def add_parts(parts: list[VolumeParts]) -> VolumeParts:
    """Parts of different ranks as one."""
    return VolumeParts(pl.concat([part.sums for part in parts]), pl.concat([part.files for part in parts]))


def regrouped(parts: VolumeParts, group: pl.Series) -> VolumeParts:
    """The parts with the group that `group` has at the place which is their group now."""
    return VolumeParts(*(table.with_columns(group.gather(table["group"])) for table in (parts.sums, parts.files)))


def volumes(phases: VolumeParts, details: VolumeParts) -> Volumes:
    """Volumes of phases from the ones, of details from the others."""
    # The same bytes pass through several details of a phase: those of the largest are the phase's.
    by_detail = _added(phases.sums, _KEY).with_columns(pl.lit("", NAME).alias("detail"))
    whole = by_detail.group_by(_KEY).agg(
        pl.col("bytes").max(), pl.col("counted").sum(), pl.col("all").all(), pl.col("any").any()
    )
    named = _added(details.sums.filter(pl.col("detail").is_not_null()), _KEY)
    of_phases = phases.files.filter(pl.col("detail") == "")
    of_details = details.files.filter(pl.col("detail") != "")
    files = pl.concat([of_phases, of_details]).group_by(_KEY).agg(pl.col("files").sum())
    table = pl.concat([whole, named.select(whole.columns)]).join(files, on=_KEY, how="left")
    return {(row["group"], row["phase"], row["detail"]): _volume(row) for row in table.iter_rows(named=True)}


def _parts(spans: pl.DataFrame) -> VolumeParts:
    # One number for the three columns of _KEY, or for who and which file: few columns are compared fastest.
    phase, detail = (pl.col(name).to_physical().cast(pl.Int64).fill_null(255) for name in ("phase", "detail"))
    key = (pl.col("group").cast(pl.Int64) * 256 + phase) * 256
    whose_file = (pl.col("rank") * 256 + phase) * (1 << 32) + pl.col("file").to_physical().cast(pl.Int64)
    rows = spans.select(*_KEY, "bytes", "blocking", (key + detail).alias("key"), whose_file.alias("files"))
    sums = rows.group_by("key").agg(
        pl.col(_KEY).first(),
        pl.col("bytes").sum(),
        pl.col("bytes").count().alias("counted"),
        pl.col("blocking").all().alias("all"),
        pl.col("blocking").any().alias("any"),
    )
    named = rows.filter(pl.col("files").is_not_null()).select(*_KEY, "key", "files")
    # A file that passes through several details of a phase is one file of the phase.
    of_phases = named.with_columns(pl.lit("", NAME).alias("detail"), pl.col("key") // 256)
    of_details = named.filter(pl.col("detail").is_not_null())
    files = [
        table.group_by("key").agg(pl.col(_KEY).first(), pl.col("files").n_unique()) for table in (of_phases, of_details)
    ]
    return VolumeParts(sums.drop("key"), pl.concat(files).drop("key"))


def _added(sums: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    return sums.group_by(key).agg(pl.col("bytes", "counted").sum(), pl.col("all").all(), pl.col("any").any())


def _volume(row: dict[str, Any]) -> Volume:
    blocking = "all" if row["all"] else "some" if row["any"] else "none"
    return Volume(row["bytes"] if row["counted"] else None, row["files"], blocking)
