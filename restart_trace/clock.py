"""Clocks of the trace: a monotonic clock for spans, anchored once per process to Unix time.

Processes on one host within one boot share CLOCK_MONOTONIC, so their times compare exactly; the boot id in the first
record identifies them. Between hosts the anchors are compared, which is as accurate as the hosts' time service.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

now_ns = time.monotonic_ns  # CLOCK_MONOTONIC on Linux: system-wide, not stepped by time services


@dataclass(frozen=True)
class Anchor:
    """Unix time `wall_ns` was read at monotonic time `monotonic_ns`, with an error of at most `error_ns`."""

    wall_ns: int
    monotonic_ns: int
    error_ns: int


def read_anchor() -> Anchor:
    """Read the wall clock and the monotonic clock at the same time; the best of three tries."""
    return min((_read_once() for _ in range(3)), key=lambda anchor: anchor.error_ns)


def _read_once() -> Anchor:
    before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    return Anchor(wall, (before + after) // 2, after - before)


_FIRST_TIME_NAMESPACE = "time:[4026531834]"  # PROC_TIME_INIT_INO, linux/proc_ns.h


def boot_id() -> str:
    """Kernel boot id; empty if the kernel does not provide it.

    In a time namespace (time_namespaces(7)), which may have another monotonic clock, the namespace is appended.
    """
    path = Path("/proc/sys/kernel/random/boot_id")
    if not path.exists():
        return ""
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        namespace = _FIRST_TIME_NAMESPACE
    return path.read_text().strip() + ("" if namespace == _FIRST_TIME_NAMESPACE else f"/{namespace}")


def process_start_ticks(pid: int | None = None) -> int | None:
    """Start of a process in clock ticks since boot: field 22 of /proc/PID/stat (proc(5)).

    Every process reads the same number, so it distinguishes processes that have reused a pid. None if there is no /proc
    or no such process.
    """
    try:
        stat = Path(f"/proc/{pid or 'self'}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # the command name may hold spaces and parentheses


def process_start_ns(pid: int | None = None) -> int | None:
    """Start of a process on the monotonic clock in ns, with a resolution of one clock tick (10 ms).

    None where there is no /proc or no such process.
    """
    ticks = process_start_ticks(pid)
    if ticks is None:
        return None
    since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    # Ticks advance while the machine is suspended, the monotonic clock does not. Rounding removes the jitter of the
    # reading, so that every call returns the same value.
    return since_boot_ns - round(_suspended_ns() / 1e6) * 1_000_000


def _suspended_ns() -> int:
    """How long this machine was suspended since boot, ns: the tightest of five readings of two clocks.

    Several readings, since the process may lose its core for milliseconds between the two clocks.
    """
    readings = []
    for _ in range(5):
        before, boot = time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        readings.append((time.monotonic_ns() - before, boot - before))
    return min(readings)[1]
