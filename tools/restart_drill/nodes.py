"""Faults of nodes: by a program of the user's, since every cluster has its own way to switch a node off.

--nodes-command starts it once, ahead of time, since some injection points last a few milliseconds. It reads lines and
does what they say; when that is done it prints a line `ok`, or one that begins with `error`:

    lose NODE               its power fails
    cut NODE                its link carries nothing any more; its processes live on
    slow-link NODE          its link is slow
    slow-disk NODE          its disk is slow
    signal NODE NAME PID    a signal (STOP or KILL) to a process, by its number on that node
    mend NODE               undo all of these; a node that was lost is switched on again
    processes NODE          before the `ok`, print the command line of each of its processes, one a line

NODE is the host name that the ranks there record. The program ends at the end of its input.
"""

from __future__ import annotations

import contextlib
import queue
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from restart_trace.clock import now_ns

from .kept import KeptOnNodes
from .launch import DrillError, Launch, Place, recorded_ranks

_CALL_S = 600.0  # a real machine takes minutes to come up again
_POLL_S = 0.1
# Fault -> action of the program.
NODE_FAULTS = {"node-loss": "lose", "link-cut": "cut", "link-slow": "slow-link", "disk-slow": "slow-disk"}
RANK_FAULTS = {"rank-stopped": "STOP", "sigkill-one": "KILL"}  # -> the signal, to the last rank of the node
_ERROR_OF_RANK = re.compile(rb"error on rank (\d+), ")
LOST = "node-loss"  # that node runs nothing of the launch again
TAKES_A_SPARE = (LOST, "link-cut")


class Program:
    """The running program of --nodes-command; use `started`. Several threads may call it."""

    def __init__(self, words: list[str]) -> None:
        self._shown = shlex.join(words)
        self._lock = threading.Lock()
        self._lines: queue.Queue[str | None] = queue.Queue()  # None: it has ended
        try:
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        except OSError as error:
            raise DrillError(f"--nodes-command {self._shown}: cannot be started: {error}") from None
        threading.Thread(target=self._read, name="nodes-command", daemon=True).start()

    def call(self, *words: str) -> list[str]:
        """Have it do something; the lines that it prints before `ok`. Raises DrillError if it does not say `ok`."""
        with self._lock:
            said: list[str] = []
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(" ".join(words) + "\n")
                while (line := self._lines.get(timeout=_CALL_S)) not in ("ok", None):
                    if line.startswith("error"):
                        raise DrillError(f"--nodes-command {self._shown}: {' '.join(words)}: {line}")
                    said.append(line)
            except (OSError, queue.Empty):
                line = None
            if line is None:
                raise DrillError(
                    f"--nodes-command {self._shown}: {' '.join(words)}: it has ended, or has said neither ok nor error "
                    f"within {_CALL_S:g} s; see docs/restart_drill.md"
                )
            return said

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._process.wait()


@contextlib.contextmanager
def nodes_of(words: list[str], which: Sequence[int]) -> Iterator[Nodes]:
    """The nodes that a program harms. At the end all are mended. Raises DrillError if it cannot be started."""
    program = Program(words)
    nodes = Nodes(program, which)
    try:
        yield nodes
    finally:
        try:
            nodes.mend()
        finally:
            program.close()


class Nodes:
    """The nodes of a job. `program`: words of --nodes-command. `which`: are harmed, of those that train."""

    def __init__(self, program: Program, which: Sequence[int]) -> None:
        self._program = program
        self.which = which
        self._harmed: dict[str, tuple[str, int]] = {}  # node -> (fault, the cycle that it struck)
        self._lock = threading.Lock()

    def harm(self, fault: str, node: str, pid: int, cycle: int) -> None:
        """Raises DrillError if the program fails."""
        if fault in RANK_FAULTS:
            self._program.call("signal", node, RANK_FAULTS[fault], str(pid))
            return
        with self._lock:
            self._harmed[node] = (fault, cycle)
        self._program.call(NODE_FAULTS[fault], node)

    @property
    def gone(self) -> set[str]:
        """Nodes that nobody reaches."""
        with self._lock:
            return {node for node, (fault, _) in self._harmed.items() if fault in TAKES_A_SPARE}

    def mend(self, before: int | None = None) -> None:
        """Mend all nodes; those that live, and were harmed in a cycle before this one, if one is given."""
        with self._lock:
            harmed = dict(self._harmed)
        for node, (fault, cycle) in harmed.items():
            if before is None or (fault != LOST and cycle < before):
                self._program.call("mend", node)
                with self._lock:
                    if self._harmed.get(node) == (fault, cycle):
                        del self._harmed[node]

    def processes(self, node: str, of: str) -> list[str]:
        """Command lines on a node with this text in them."""
        return [line for line in self._program.call("processes", node) if of in line]


class LaunchOnNodes(Launch):
    """A launch whose ranks are on several nodes: they are known by their traces, and harmed through `nodes`."""

    def __init__(self, command: list[str], log_path: Path, echo: bool, nodes: Nodes, trace_dir: Path) -> None:
        # Rank that ended with an error -> when that was heard, and what; since the last fault. Before the log is read.
        self._named: dict[int, tuple[int, str]] = {}
        super().__init__(command, log_path, echo)
        self._nodes = nodes
        self._trace_dir = trace_dir
        self._places: list[Place] = []  # of the ranks of a cycle, in order
        self._hosts: set[str] = set()  # that have run a rank
        # Of the last fault: the last rank on the node, the number of ranks, and when (monotonic, ns).
        self._struck = self._ranks_struck = self._struck_ns = 0

    def find_ranks(self, trace_dir: Path, cycle: int) -> bool:
        if self._found == cycle:
            return True
        world_size, ranks = recorded_ranks(trace_dir, cycle)
        self._places = [place for _, place in sorted(ranks.items())]
        self._hosts |= {place.host for place in self._places}
        self._found = cycle if 0 < world_size == len(ranks) else None
        return self._found is not None

    def harm(self, fault: str) -> int:
        """Harm nodes, or the last rank on each; how many ranks that strikes. Raises DrillError."""
        hosts = list(dict.fromkeys(place.host for place in self._places))
        try:
            struck = [hosts[number] for number in self._nodes.which]
        except IndexError:
            raise DrillError(f"--node {self._nodes.which}: the ranks are on {len(hosts)} nodes") from None
        pids = [[place.pid for place in self._places if place.host == host] for host in struck]
        self._struck = max(rank for rank, place in enumerate(self._places) if place.host == struck[0])
        self._ranks_struck = len(self._places)
        self._named = {}
        self._struck_ns = now_ns()
        for host, mine in zip(struck, pids, strict=True):
            self._nodes.harm(fault, host, mine[-1], self._found or 0)
        return len(struck) if fault in RANK_FAULTS else sum(map(len, pids))

    def kept(self) -> KeptOnNodes:
        """What is in the memory of the nodes that the last fault has left."""
        return KeptOnNodes(dict(enumerate(self._places)), self._nodes.gone)

    def not_named(self) -> tuple[str, ...]:
        """Which of the ranks of the last cycle that was struck have ended without naming the rank that was stopped."""
        named = self._that_named()
        others = set(range(self._ranks_struck)) - {self._struck}
        return tuple(
            f"rank {rank} did not name rank {self._struck}, which was stopped" for rank in sorted(others - set(named))
        )

    def named_s(self) -> float | None:
        heard = [at_ns for rank, at_ns in self._that_named().items() if rank != self._struck]
        return (max(heard) - self._struck_ns) / 1e9 if heard else None

    def _that_named(self) -> dict[int, int]:
        """The ranks that ended with an error that names the last rank which was struck, and when that was heard."""
        named = re.compile(rf"\brank {self._struck} (on \S+ does not answer|never came)")
        return {rank: at_ns for rank, (at_ns, said) in list(self._named.items()) if named.search(said)}

    def _heard(self, line: bytes) -> None:
        found = _ERROR_OF_RANK.match(line)
        if found is not None:
            self._named[int(found[1])] = (now_ns(), line.decode(errors="replace"))

    def wait_until_gone(self, time_limit_s: float) -> None:
        """Also on the nodes that have run ranks. They are mended before: one that is cut off learns of the end then."""
        self._nodes.mend()
        super().wait_until_gone(time_limit_s)
        deadline = time.monotonic() + time_limit_s
        for host in sorted(self._hosts):
            while left := self._nodes.processes(host, str(self._trace_dir)):
                if time.monotonic() > deadline:
                    raise DrillError(f"{len(left)} processes outlived the launch on {host}: {left[0][:200]}")
                time.sleep(_POLL_S)
