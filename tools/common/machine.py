"""What of the machine matters to a measurement."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """What of the machine matters to the figures; no names."""
    return {
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average_1_min": round(os.getloadavg()[0], 2),
    }


def filesystem_of(place: Path) -> str:
    """Type of the file system that `place` is on, as /proc/mounts has it; "unknown" elsewhere."""
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/mounts").read_text().splitlines()
    except OSError:
        return kind
    where = str(place.resolve())
    for line in lines:
        _, mount, found, *_ = line.split()
        if (where + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, found
    return kind
