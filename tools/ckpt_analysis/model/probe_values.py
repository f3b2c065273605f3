"""Values of the probes as columns: memory and I/O counters at the begin and end of operations."""

from __future__ import annotations

import polars as pl

from .frame import Frames

# What the instrument samples (restart_trace/probes.py), in the order of the report.
NAMES = (
    "rss_bytes",
    "device_allocated_bytes", "device_reserved_bytes", "device_peak_allocated_bytes", "gpu_memory_used_bytes",
    "page_cache_bytes", "dirty_bytes", "writeback_bytes",
    "io_read_calls_bytes", "io_write_calls_bytes", "io_read_storage_bytes", "io_write_storage_bytes",
    "gpu_utilization_percent",
)  # fmt: skip
# What an operation measured of itself (Operation.measure): the bus by a start-up, the store by saves and loads, the
# size of its checkpoint by a load, the others by a save.
MEASURED = (
    "bus_to_host_bytes_per_s", "bus_to_device_bytes_per_s",
    "device_to_host_bytes", "device_to_host_device_s", "device_to_host_before_release_bytes",
    "replicate_wire_bytes", "replicate_compress_s", "replicate_waited_s", "replicate_at_once_bytes",
    "store_requests", "store_retries", "store_throttled", "store_request_s",
    "checkpoint_bytes", "original_bytes", "compress_s",
)  # fmt: skip
_VALUES = pl.Struct(dict.fromkeys((*NAMES, *MEASURED), pl.Float64()))


def probe_values(frames: Frames) -> pl.DataFrame:
    """Probes of the run's operations: group, operation, cycle, rank, at ("start" or "end") and one column per name.

    A name that no probe has is a column of nulls. The frame is empty where nothing was sampled.
    """
    operations = frames.operations.select("group", "operation", "cycle", "rank", "op_id")
    values = pl.col("values").cast(pl.String).str.json_decode(_VALUES)
    return (
        frames.probes.drop("operation")
        .join(operations, on=["cycle", "rank", "op_id"], how="inner")
        .select("group", "operation", "cycle", "rank", "at", values)
        .unnest("values")
        .sort("group", "rank", pl.col("at") == "end")
    )
