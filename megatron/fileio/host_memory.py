"""How much memory a host has and how much is free, as the kernel reports it; standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes of host memory that can be had without swapping: what the kernel and this process's cgroups say."""
    available = _meminfo(proc, "MemAvailable")
    for limit, used, _ in _cgroup_limits(proc, cgroups):
        available = min(available, limit - used)
    return max(available, 0)


def memory_limit(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> tuple[int, str]:
    """The most that all processes of this host, or of this cgroup, can ever have: bytes, and what says so."""
    limits = [(_meminfo(proc, "MemTotal"), "the host's memory")]
    limits += [(limit, f"the limit of {path}") for limit, _, path in _cgroup_limits(proc, cgroups)]
    return min(limits)


def _meminfo(proc: Path, name: str) -> int:
    return int((proc / "meminfo").read_text().split(f"{name}:")[1].split()[0]) * 1024


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int, Path]]:
    """Limit, use and file of each memory cgroup that this process is in, of version 1 or 2, the outer ones too."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        inner = root / path.lstrip("/")
        for directory in (inner, *inner.parents):
            if directory == cgroups.parent:
                break
            try:
                limit = (directory / names[0]).read_text().strip()
                used = int((directory / names[1]).read_text())
            except (OSError, ValueError):  # not mounted here, or the root of the hierarchy
                continue
            if limit != "max":
                yield int(limit), used, directory / names[0]
