"""Samples of the process, the host and the device, taken at the boundaries of operations.

Every name ends in its unit. A value that cannot be had here is left out, never guessed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from restart_trace.devices import nvml_device

_IO_NAMES = {"rchar": "io_read_calls_bytes", "wchar": "io_write_calls_bytes"} | {
    "read_bytes": "io_read_storage_bytes",
    "write_bytes": "io_write_storage_bytes",
}
_MEMINFO_NAMES = {"Cached": "page_cache_bytes", "Dirty": "dirty_bytes", "Writeback": "writeback_bytes"}


def make_probe(local_rank: int) -> Callable[[], Mapping[str, float]]:
    """Return a function that samples this process, its host and, where there is one, the GPU of this rank."""
    nvml_device = _open_nvml(local_rank)

    def probe() -> Mapping[str, float]:
        return _host_values() | _torch_values() | (_nvml_values(nvml_device) if nvml_device else {})

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


def _torch_values() -> dict[str, float]:
    torch = sys.modules.get("torch")  # never the one to import it
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {
        "device_allocated_bytes": torch.cuda.memory_allocated(),
        "device_reserved_bytes": torch.cuda.memory_reserved(),
    }


def _open_nvml(local_rank: int) -> object | None:
    """Handle of this rank's GPU; None where there is no NVIDIA driver, or it cannot be said which it is."""
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/dev/nvidiactl").exists():
        return None  # saves the import where no driver is
    import pynvml

    try:
        pynvml.nvmlInit()
        return nvml_device(os.environ, local_rank, pynvml)
    except pynvml.NVMLError:
        return None


def _nvml_values(device: object) -> dict[str, float]:
    import pynvml

    values: dict[str, float] = {}
    readers: dict[str, Callable[[], Any]] = {
        "gpu_memory_used_bytes": lambda: pynvml.nvmlDeviceGetMemoryInfo(device).used,
        "gpu_utilization_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu,
        # NVML samples PCIe over 20 ms; in KB/s by its documentation.
        "pcie_tx_bytes_per_s": lambda: 1000 * pynvml.nvmlDeviceGetPcieThroughput(device, 0),
        "pcie_rx_bytes_per_s": lambda: 1000 * pynvml.nvmlDeviceGetPcieThroughput(device, 1),
    }
    for name, read in readers.items():
        try:
            values[name] = read()
        except pynvml.NVMLError:  # not supported by this device or hidden by virtualisation: leave it out
            continue
    return values
