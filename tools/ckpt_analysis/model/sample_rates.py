"""Samples as rates: bytes per second over PCIe, NVLink and to storage, between the samples of a rank."""

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


def rates_over(frames: Frames, group: int) -> pl.DataFrame:
    """Rates during the operation `group`: rank, seconds (since its start on that rank) and a column for each of NAMES.

    Bytes per second; null where nothing was sampled. What a counter rose by since the sample before counts for the time
    between the two, and is shown at its end. Without an end of the operation on a rank its samples are left out.
    """
    window = frames.operations.filter((pl.col("group") == group) & pl.col("end_ns").is_not_null())
    window = window.select("cycle", "rank", "start_ns", "end_ns")
    between = (pl.col("time_ns").diff() / 1e9).over("rank")
    return (
        frames.samples.join(window, on=["cycle", "rank"], how="inner")
        .sort("rank", "time_ns")
        .with_columns(pl.col("values").cast(pl.String).str.json_decode(_VALUES))
        .unnest("values")
        .with_columns(pl.when(between > 0).then(pl.col(name).diff().over("rank") / between) for name in _COUNTED)
        # The first sample after the end tells of the operation's last part.
        .filter(pl.col("time_ns").shift(1, fill_value=0).over("rank") <= pl.col("end_ns"))
        .filter(pl.col("time_ns") >= pl.col("start_ns"))
        .select("rank", ((pl.col("time_ns") - pl.col("start_ns")) / 1e9).alias("seconds"), *_SAMPLED, *_COUNTED)
        .rename(_SAMPLED | _COUNTED)
    )
