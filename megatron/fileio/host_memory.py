"""How much memory a host has and how much is free, as the kernel reports it; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from restart_trace.cgroups import MOUNT, PROC, own_groups

# By version of control groups.
_LIMIT_AND_USE = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


def available_memory(proc: Path = PROC, cgroups: Path = MOUNT) -> int:
    """Bytes of host memory that can be had without swapping: what the kernel and this process's cgroups say."""
    available = _meminfo(proc, "MemAvailable")
    for limit, used, _ in _cgroup_limits(proc, cgroups):
        available = min(available, limit - used)
    return max(available, 0)


def memory_limit(proc: Path = PROC, cgroups: Path = MOUNT) -> tuple[int, str]:
    """The most that all processes of this host, or of this cgroup, can ever have: bytes, and what says so."""
    limits = [(_meminfo(proc, "MemTotal"), "the host's memory")]
    limits += [(limit, f"the limit of {path}") for limit, _, path in _cgroup_limits(proc, cgroups)]
    return min(limits)


def _meminfo(proc: Path, name: str) -> int:
    return int((proc / "meminfo").read_text().split(f"{name}:")[1].split()[0]) * 1024


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int, Path]]:
    """Limit, use and file of each memory cgroup that this process is in, of version 1 or 2, the outer ones too."""
    for version, directory in own_groups("memory", proc, cgroups):
        limit_name, used_name = _LIMIT_AND_USE[version]
        try:
            limit = (directory / limit_name).read_text().strip()
            used = int((directory / used_name).read_text())
        except (OSError, ValueError):  # not mounted here, or the root of the hierarchy
            continue
        if limit != "max":
            yield int(limit), used, directory / limit_name
