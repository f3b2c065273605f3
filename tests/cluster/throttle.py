"""A slow disk: a control group (version 1, blkio) whose processes use the device of a directory at a limited rate.

Limited is what a process itself writes to the device: direct I/O, and what fsync has written of its pages. What the
kernel writes back by itself is not. Of reads, if they are limited, it is what the page cache does not serve. The group
has a name outside the cluster; it is removed by `free`, and where the holder of a cluster is killed it stays, empty.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup/blkio")
_GONE_S = 120.0


class Throttle:
    """`name`: of the group. Nothing is made before `throttle`."""

    def __init__(self, name: str, directory: Path) -> None:
        self._group = _ROOT / f"cluster_{name}"
        self._directory = directory

    def throttle(self, pids: Iterable[int], kbyte_per_s: int, *, reads: bool = False) -> None:
        """Limit the writes of these processes, and of those that they start, in all; with `reads` their reads, too.

        Raises OSError where it cannot be done.
        """
        device = os.stat(self._directory).st_dev
        self._group.mkdir(exist_ok=True)
        limit = f"{os.major(device)}:{os.minor(device)} {kbyte_per_s * 1000}"
        for what in ("write", "read") if reads else ("write",):
            (self._group / f"blkio.throttle.{what}_bps_device").write_text(limit)
        self._move(pids, self._group)

    def free(self) -> None:
        """No limit any more."""
        if not self._group.is_dir():
            return
        deadline = time.monotonic() + _GONE_S
        while True:
            self._move(map(int, (self._group / "cgroup.procs").read_text().split()), _ROOT)
            try:
                self._group.rmdir()
                return
            except OSError:  # one has just been started, or has not ended yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def _move(self, pids: Iterable[int], group: Path) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                (group / "cgroup.procs").write_text(str(pid))
