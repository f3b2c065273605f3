"""Differences of a rank's samples as rates: bytes per second over PCIe, NVLink and to storage."""

from __future__ import annotations

import polars as pl

from .frame import Frames

# Rates that are sampled as such, and counters (restart_trace/probes.py) -> how the report calls them, in its order.
_SAMPLED = {"pcie_tx_bytes_per_s": "PCIe, from the device", "pcie_rx_bytes_per_s": "PCIe, to the device"}
_COUNTED = {
    "nvlink_tx_bytes": "NVLink, from the device",
    "nvlink_rx_bytes": "NVLink, to the device",
    "io_write_calls_bytes": "written by calls",
    "io_write_storage_bytes": "sent to storage",
    "io_read_calls_bytes": "read by calls",
    "io_read_storage_bytes": "fetched from storage",
}
NAMES = (*_SAMPLED.values(), *_COUNTED.values())
_VALUES = pl.Struct(dict.fromkeys([*_SAMPLED, *_COUNTED], pl.Float64()))
# What a driver may show as 0 although bytes are transferred: on some virtual machines, and without the link.
_OF_DEVICE = [name for name in (*_SAMPLED, *_COUNTED) if name.startswith(("pcie", "nvlink"))]


def never_above_zero(frames: Frames) -> list[str]:
    """Those of NAMES of a device that were sampled, and are 0 in all samples of the run: nothing was observed."""
    largest = _samples(frames).select(pl.col(name).max() for name in _OF_DEVICE).row(0)
    return [(_SAMPLED | _COUNTED)[name] for name, value in zip(_OF_DEVICE, largest, strict=True) if value == 0]


def _samples(frames: Frames) -> pl.DataFrame:
    """With a column for each value."""
    return frames.samples.with_columns(pl.col("values").cast(pl.String).str.json_decode(_VALUES)).unnest("values")


def rates_over(frames: Frames, group: int) -> pl.DataFrame:
    """Rates during the operation `group`: rank, seconds (since its start on that rank) and a column for each of NAMES.

    Bytes per second; null where nothing was sampled, and where a device's value is `never_above_zero`. What a counter
    rose by since the sample before counts for the time between the two, and is shown at its end. Without an end of the
    operation on a rank its samples are left out.
    """
    window = frames.operations.filter((pl.col("group") == group) & pl.col("end_ns").is_not_null())
    window = window.select("cycle", "rank", "start_ns", "end_ns")
    between = (pl.col("time_ns").diff() / 1e9).over("rank")
    return (
        _samples(frames)
        .with_columns(pl.when(pl.col(name).max() > 0).then(pl.col(name)) for name in _OF_DEVICE)
        .join(window, on=["cycle", "rank"], how="inner")
        .sort("rank", "time_ns")
        .with_columns(pl.when(between > 0).then(pl.col(name).diff().over("rank") / between) for name in _COUNTED)
        # The first sample after the end tells of the operation's last part.
        .filter(pl.col("time_ns").shift(1, fill_value=0).over("rank") <= pl.col("end_ns"))
        .filter(pl.col("time_ns") >= pl.col("start_ns"))
        .select("rank", ((pl.col("time_ns") - pl.col("start_ns")) / 1e9).alias("seconds"), *_SAMPLED, *_COUNTED)
        .rename(_SAMPLED | _COUNTED)
    )
