"""What --restart-trace-probes-interval reads of the device, while bytes go over the bus."""

from __future__ import annotations

from collections.abc import Callable

import torch

from restart_trace.probes import make_probe
from tests.gpu.measured import NOT_OBSERVED

BYTES = 1 << 28
COPIED = ("pcie_rx_bytes_per_s", "gpu_utilization_percent")  # what the copies must show


def test_nvml_sees_the_bus_and_the_memory(record_property: Callable[[str, object], None]) -> None:
    """Copies to the device are under way in the 20 ms in which NVML measures each direction."""
    probe = make_probe(0, bus=True)
    source = torch.zeros(BYTES, dtype=torch.uint8).pin_memory()
    target = torch.zeros(BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(200):  # 50 GiB: a second and more, of which the sample takes 40 ms
        target.copy_(source, non_blocking=True)
    values = probe()
    torch.cuda.synchronize()
    for name, value in values.items():
        hidden = name in COPIED and value == 0  # as some virtual machines show it
        record_property(name, f"{NOT_OBSERVED}: it reads 0 while bytes are copied" if hidden else value)
    assert values["device_peak_allocated_bytes"] >= values["device_allocated_bytes"] >= BYTES
    if "gpu_memory_used_bytes" in values:  # a MIG device may hide it
        assert values["gpu_memory_used_bytes"] >= BYTES
    if values.get("pcie_rx_bytes_per_s"):
        assert values["pcie_rx_bytes_per_s"] > 1e9
