"""Samples of the process, the host and the device, taken at the boundaries of operations or at intervals.

Every name ends in its unit. A value that is not available is left out, never guessed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from restart_trace.devices import accelerator_in_use, device_index, nvml_device

logger = logging.getLogger(__name__)

_IO_NAMES = {"rchar": "io_read_calls_bytes", "wchar": "io_write_calls_bytes"} | {
    "read_bytes": "io_read_storage_bytes",
    "write_bytes": "io_write_storage_bytes",
}
_MEMINFO_NAMES = {"Cached": "page_cache_bytes", "Dirty": "dirty_bytes", "Writeback": "writeback_bytes"}


_ALL_LINKS = 0xFFFFFFFF  # scope of NVML's NVLink counters


Probe = Callable[[], Mapping[str, float]]


def forgiving(probe: Probe, what: str) -> Callable[[], dict[str, float] | None]:
    """`probe`, with None in place of an error, such as of no open file left: the trace lacks `what`, logged once."""
    told = False

    def sample() -> dict[str, float] | None:
        nonlocal told
        try:
            return dict(probe())
        except Exception as exc:
            if not told:
                logger.warning("the trace lacks %s, which cannot be read: %r (said once)", what, exc)
            told = True
            return None

    return sample


def make_probe(local_rank: int, *, bus: bool = False) -> Probe:
    """Return a function that samples this process, its host and, if there is one, the GPU of this rank.

    With `bus` it also samples the traffic of PCIe and NVLink. Call it on a separate thread then, since NVML measures
    PCIe for 20 ms per direction while the caller waits.
    """
    device = _open_nvml(local_rank)

    def probe() -> Mapping[str, float]:
        values = _host_values() | _torch_values(local_rank)
        if device is not None:
            import pynvml

            values |= nvml_values(device, pynvml, bus=bus)
        return values

    return probe


def _host_values() -> dict[str, float]:
    import psutil

    values: dict[str, float] = {"rss_bytes": psutil.Process().memory_info().rss}
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
        meminfo = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux, or hidden from this user
        return values
    for line in lines:
        name, _, number = line.partition(": ")
        if name in _IO_NAMES:
            values[_IO_NAMES[name]] = int(number)
    for line in meminfo:
        name, _, rest = line.partition(":")
        if name in _MEMINFO_NAMES:
            values[_MEMINFO_NAMES[name]] = int(rest.split()[0]) * 1024
    return values


def _torch_values(local_rank: int) -> dict[str, float]:
    kind = accelerator_in_use()  # to look for one would initialise the driver in a process that may fork its users
    if kind is None:
        return {}
    device_module = sys.modules["torch"].get_device_module(kind)
    # By its index: on threads other than the training thread the current device is 0.
    index = device_index(local_rank, device_module.device_count())
    if index is None:
        return {}
    return {
        "device_allocated_bytes": device_module.memory_allocated(index),
        "device_reserved_bytes": device_module.memory_reserved(index),
        "device_peak_allocated_bytes": device_module.max_memory_allocated(index),  # since the process started
    }


def _open_nvml(local_rank: int) -> object | None:
    """Handle of this rank's GPU; None if there is no NVIDIA driver, or the GPU cannot be identified."""
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/dev/nvidiactl").exists():
        return None  # avoids the import if there is no driver
    import pynvml

    try:
        pynvml.nvmlInit()
        return nvml_device(os.environ, local_rank, pynvml)
    except pynvml.NVMLError:
        return None


def nvml_values(device: object, nvml: Any, *, bus: bool) -> dict[str, float]:
    """Values of the handle `device`, read by `nvml`, the module pynvml; with `bus` also the traffic of PCIe and NVLink.

    Values that the device does not support, or virtualisation hides, are left out.
    """
    values: dict[str, float] = {}
    readers: dict[str, Callable[[], Any]] = {
        "gpu_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(device).used,
        "gpu_utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu,
    }
    if bus:  # NVML returns KB/s
        readers |= {
            "pcie_tx_bytes_per_s": lambda: (
                1000 * nvml.nvmlDeviceGetPcieThroughput(device, nvml.NVML_PCIE_UTIL_TX_BYTES)
            ),
            "pcie_rx_bytes_per_s": lambda: (
                1000 * nvml.nvmlDeviceGetPcieThroughput(device, nvml.NVML_PCIE_UTIL_RX_BYTES)
            ),
        }
    for name, read in readers.items():
        try:
            values[name] = read()
        except nvml.NVMLError:
            continue
    return values | (_nvlink_values(device, nvml) if bus else {})


def _nvlink_values(device: object, nvml: Any) -> dict[str, float]:
    """Bytes transferred over all NVLinks so far; NVML counts KiB ("Field Value Enums" in its documentation)."""
    fields = {
        "nvlink_tx_bytes": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        "nvlink_rx_bytes": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    }
    try:
        found = nvml.nvmlDeviceGetFieldValues(device, [(field, _ALL_LINKS) for field in fields.values()])
    except nvml.NVMLError:
        return {}
    return {
        name: 1024 * int(value.value.ullVal)
        for name, value in zip(fields, found, strict=True)
        if value.nvmlReturn == nvml.NVML_SUCCESS
    }
