"""The control groups that this process is in, of version 1 or 2 (cgroups(7)); standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
MOUNT = Path("/sys/fs/cgroup")


def own_groups(controller: str, proc: Path = PROC, mount: Path = MOUNT) -> Iterator[tuple[int, Path]]:
    """(version, directory) of each control group of this process that may limit `controller`, innermost first.

    A directory need not be there: within a container, the path of a group may be that of the host.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        inner = root / path.lstrip("/")
        for directory in (inner, *inner.parents):
            if directory == mount.parent:
                break
            yield 2 if not controllers else 1, directory


def cpu_limit(proc: Path = PROC, mount: Path = MOUNT) -> float | None:
    """Cores' worth of processor time that the tightest quota of this process's groups allows; None without a quota.

    The bandwidth control of the Linux scheduler (Documentation/scheduler/sched-bwc.rst): `docker run --cpus`, and
    `limits.cpu` of Kubernetes.
    """
    return min((limit for limit in map(_quota, own_groups("cpu", proc, mount)) if limit is not None), default=None)


def _quota(group: tuple[int, Path]) -> float | None:
    version, directory = group
    try:
        if version == 2:
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text().strip()
            period = (directory / "cpu.cfs_period_us").read_text().strip()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # not mounted here, or the root of the hierarchy
        return None
