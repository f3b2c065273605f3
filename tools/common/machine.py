"""What of the machine matters to a measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from restart_trace.mounts import mount_of


def machine() -> dict[str, Any]:
    """What of the machine matters to the figures; no names."""
    return {
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_1_min": round(os.getloadavg()[0], 2),
    }


def filesystem_of(place: Path) -> str:
    """Type of the file system that `place` is on; "unknown" where the kernel does not tell."""
    mount = mount_of(place)
    return mount.fs_type if mount else "unknown"
