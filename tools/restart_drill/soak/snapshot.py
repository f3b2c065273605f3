"""A snapshot of a launch on this host: its processes and what each uses, and the files in /dev/shm and TMPDIR.

    python -m tools.restart_drill.soak.snapshot LAUNCH_ID TMPDIR TIMES

prints TIMES snapshots, each as a line of JSON. The soak runs this on each node (tools/restart_drill/nodes.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from ...common.environments import has_variable
from ..launch import LAUNCH_ID_VARIABLE
from ..own_shm import SHM

INTERVAL_S = 0.05
_MEMFD = "/memfd:"  # how /proc names a file of memfd_create(2)


class Process(NamedTuple):
    """A process of the launch. A zombie uses nothing.

    `began`: seconds since the epoch. `memory`: resident bytes.
    """

    pid: int
    parent: int
    began: float
    name: str
    threads: int = 0
    descriptors: int = 0
    memory: int = 0


_IDENTITY_FIELDS = 4  # of Process; the other fields are resources


class Snapshot(NamedTuple):
    """`slots`: total bytes of the memfd files that the processes hold, each file counted once."""

    processes: list[Process]
    slots: int
    shared_memory: list[str]  # names in /dev/shm
    temporary: list[str]  # names in TMPDIR

    def with_descendants(self, pids: Collection[int]) -> set[int]:
        """Those of `pids` that live, and their living descendants."""
        found = {process.pid for process in self.processes} & set(pids)
        while more := {process.pid for process in self.processes if process.parent in found} - found:
            found |= more
        return found

    def orphans(self) -> list[Process]:
        """Processes whose parent is not in the launch, without the first process of the launch, which has none."""
        pids = {process.pid for process in self.processes}
        without_parent = [process for process in self.processes if process.parent not in pids]
        return sorted(without_parent, key=lambda process: process.began)[1:]

    @staticmethod
    def minimum(snapshots: Sequence[Snapshot]) -> Snapshot:
        """The minimum of each resource over snapshots of one host, for the processes that are in all of them."""
        by_pid = [{process.pid: process for process in snapshot.processes} for snapshot in snapshots]
        processes = []
        for pid, last in by_pid[-1].items():
            resources = [found[pid][_IDENTITY_FIELDS:] for found in by_pid if pid in found]
            if len(resources) == len(snapshots):
                processes.append(Process(*last[:_IDENTITY_FIELDS], *map(min, zip(*resources, strict=True))))
        return snapshots[-1]._replace(processes=processes, slots=min(snapshot.slots for snapshot in snapshots))

    @staticmethod
    def parse(line: str) -> Snapshot:
        """The snapshot in a line that this program has printed."""
        processes, *rest = json.loads(line)
        return Snapshot([Process(*fields) for fields in processes], *rest)


def take(launch_id: str, temporary: str) -> Snapshot:
    """A snapshot of this host. Processes that end while it is taken are left out."""
    processes: list[Process] = []
    slots: dict[tuple[int, int], int] = {}
    for process in _processes_of(launch_id):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            processes.append(_usage(process))
            slots.update(_memfd_files(process.pid))
    return Snapshot(processes, sum(slots.values()), _names(SHM), _names(Path(temporary)))


def _processes_of(launch_id: str) -> list[psutil.Process]:
    """The processes of the launch, and their zombie children: a zombie has no environment to tell its launch."""
    found: dict[int, psutil.Process] = {}
    others: list[psutil.Process] = []
    for process in psutil.process_iter():
        if process.pid != os.getpid() and has_variable(process.pid, LAUNCH_ID_VARIABLE, launch_id):
            found[process.pid] = process
        else:
            others.append(process)
    for process in others:
        with contextlib.suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE and process.ppid() in found:
                found[process.pid] = process
    return list(found.values())


def _usage(process: psutil.Process) -> Process:
    with process.oneshot():
        found = Process(process.pid, process.ppid(), process.create_time(), process.name())
        if process.status() == psutil.STATUS_ZOMBIE:
            return found
        with contextlib.suppress(psutil.ZombieProcess):
            return found._replace(
                threads=process.num_threads(), descriptors=process.num_fds(), memory=process.memory_info().rss
            )
        return found


def _memfd_files(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """((device, inode), bytes) of each memfd file that the process holds."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(_MEMFD):
                status = path.stat()
                yield (status.st_dev, status.st_ino), status.st_blocks * 512


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def main(argv: list[str]) -> int:
    launch_id, temporary, times = argv
    for _ in range(int(times)):
        print(json.dumps(take(launch_id, temporary)), flush=True)
        time.sleep(INTERVAL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
