"""The hosts of a launch: snapshots of all of them, and what a launch leaves on them."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..nodes import Nodes
from .snapshot import INTERVAL_S, Snapshot, take

_ROOT = Path(__file__).absolute().parents[3]
_POLL_S = 0.2


@contextmanager
def private_tmpdir() -> Iterator[Path]:
    """A TMPDIR for the launch alone, with the same path on all nodes."""
    before = {name: os.environ.get(name) for name in ("TMPDIR", "EXPORT")}
    temporary = Path(tempfile.mkdtemp(prefix="soak-"))
    os.environ |= {"TMPDIR": str(temporary), "EXPORT": f"{before['EXPORT'] or ''} TMPDIR"}
    try:
        yield temporary
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(temporary, ignore_errors=True)  # nodes that share /tmp with this host have removed it


class Hosts:
    """This host, which starts the launch, and the nodes on which it runs, if any.

    `temporary`: TMPDIR of the launch on all hosts. `own_shm`: this process has a private /dev/shm; without one, the
    /dev/shm of this host is not checked.
    """

    def __init__(
        self, temporary: Path, *, own_shm: bool, nodes: Nodes | None = None, names: Sequence[str] = ()
    ) -> None:
        self._temporary = str(temporary)
        self._own_shm = own_shm
        self._nodes, self._names = nodes, names
        self._here = socket.gethostname()
        self._reported: set[tuple[str, int]] = set()  # (host, pid) of the orphans that were reported
        for name in names:
            self._run(name, "mkdir", "-p", self._temporary)
        self._before = {host: set(found.shared_memory) for host, (found,) in self.snapshots("", 1).items()}

    def snapshots(self, launch_id: str, times: int) -> dict[str, list[Snapshot]]:
        """`times` snapshots of each host, by host name, without nodes that are lost or cut off."""
        found = {self._here: [self._take_here(launch_id, number) for number in range(times)]}
        unreachable = set() if self._nodes is None else self._nodes.unreachable
        for name in self._names:
            if name not in unreachable:
                module = f"{__package__}.snapshot"
                command = ["env", f"--chdir={_ROOT}", sys.executable, "-m", module, launch_id, self._temporary]
                found[name] = [Snapshot.parse(line) for line in self._run(name, *command, str(times))]
        return found

    def left_over(self, launch_id: str, limit_s: float) -> list[str]:
        """What a launch that has ended has left on all hosts, and is still there after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while True:
            found = [
                line for host, (one,) in self.snapshots(launch_id, 1).items() for line in self._left_over(host, one)
            ]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S)

    def new_orphans(self, launch_id: str, snapshots: dict[str, list[Snapshot]], limit_s: float) -> list[str]:
        """Orphaned processes of a running launch in `snapshots` that still live after `limit_s`. Reports each once."""
        deadline = time.monotonic() + limit_s
        while True:
            orphans = [(host, process) for host, found in snapshots.items() for process in found[-1].orphans()]
            new = {(host, one.pid): one.name for host, one in orphans if (host, one.pid) not in self._reported}
            if not new or time.monotonic() > deadline:
                self._reported |= new.keys()
                return [f"{host}: process {pid} ({name})" for (host, pid), name in new.items()]
            time.sleep(_POLL_S)
            snapshots = self.snapshots(launch_id, 1)

    def remove_temporary(self) -> None:
        """Remove TMPDIR of the launch from the nodes."""
        for name in self._names:
            self._run(name, "rm", "-rf", self._temporary)

    def _left_over(self, host: str, snapshot: Snapshot) -> list[str]:
        checked = self._own_shm or host != self._here
        memory = sorted(set(snapshot.shared_memory) - self._before[host]) if checked else []
        return [
            *(f"{host}: process {process.pid} ({process.name})" for process in snapshot.processes),
            *(f"{host}: /dev/shm/{name}" for name in memory),
            *(f"{host}: in TMPDIR: {name}" for name in snapshot.temporary),
        ]

    def _take_here(self, launch_id: str, number: int) -> Snapshot:
        if number:
            time.sleep(INTERVAL_S)
        return take(launch_id, self._temporary)

    def _run(self, name: str, *command: str) -> list[str]:
        assert self._nodes is not None
        return self._nodes.run(name, *command)
