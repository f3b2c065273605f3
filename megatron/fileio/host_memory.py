"""What of the host's memory is free, by the kernel's word; standard library only."""

from __future__ import annotations

from pathlib import Path


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping: what the kernel and this process's cgroup say."""
    text = Path("/proc/meminfo").read_text()
    available = int(text.split("MemAvailable:")[1].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return available if limit == "max" else min(available, int(limit) - used)
    except (OSError, ValueError):  # no cgroup v2 here
        return available
