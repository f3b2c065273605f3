"""Faults of nodes. A program of the user injects them, since each cluster has its own way to switch a node off.

The drill starts the program of --nodes-command once and in advance, since some injection points last only milliseconds.
The program reads commands, one a line. After each it prints a line `ok`, or one that begins with `error`:

    lose NODE               switch the power of the node off
    cut NODE                disconnect its network link; its processes continue
    slow-link NODE          slow its link down
    slow-disk NODE          slow its disk down
    repair NODE             undo all of these; a lost node is switched on again
    run NODE COMMAND        run a shell command on the node, and print its output before the `ok`

NODE is the host name that the node's ranks record. The program ends at the end of its input.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from megatron.net.secret import SecretError, make_secret
from restart_trace.clock import now_ns

from .launch import DrillError, Launch, RankLocation, recorded_ranks
from .memory_saves import NodeMemorySaves
from .plan import FORK

_CALL_S = 600.0  # a physical machine takes minutes to boot
_POLL_S = 0.1
# Fault -> command of the program.
NODE_FAULTS = {"node-loss": "lose", "link-cut": "cut", "link-slow": "slow-link", "disk-slow": "slow-disk"}
RANK_FAULTS = {"rank-stopped": "STOP", "sigkill-one": "KILL"}  # fault -> signal to the last rank of the node
_ERROR_OF_RANK = re.compile(rb"error on rank (\d+), ")
# Lines of the coordinator about spares: one has joined, one replaces a lost node, one is lost.
_SPARE = re.compile(rb"\[launch\] node (\d+) \(\S+\) (?:(has joined as a spare)|takes the place|is lost)")
LOST = "node-loss"  # the node runs nothing of the launch again
TAKES_A_SPARE = (LOST, "link-cut")


class Program:
    """The running program of --nodes-command. Thread-safe; `nodes_of` starts and closes it."""

    def __init__(self, words: list[str]) -> None:
        self._shown = shlex.join(words)
        self._lock = threading.Lock()
        self._lines: queue.Queue[str | None] = queue.Queue()  # None: the program has ended
        try:
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        except OSError as error:
            raise DrillError(f"--nodes-command {self._shown}: cannot be started: {error}") from None
        threading.Thread(target=self._read, name="nodes-command", daemon=True).start()

    def call(self, *words: str) -> list[str]:
        """Give it a command. Returns the lines that it prints before `ok`; raises DrillError if it prints no `ok`.

        `words` are sent unchanged, separated by blanks.
        """
        with self._lock:
            printed: list[str] = []
            try:
                assert self._process.stdin is not None
                self._process.stdin.write(" ".join(words) + "\n")
                while (line := self._lines.get(timeout=_CALL_S)) not in ("ok", None):
                    if line.startswith("error"):
                        raise DrillError(f"--nodes-command {self._shown}: {' '.join(words)}: {line}")
                    printed.append(line)
            except (OSError, queue.Empty):
                line = None
            if line is None:
                raise DrillError(
                    f"--nodes-command {self._shown}: {' '.join(words)}: the program has ended, or has printed neither "
                    f"ok nor error within {_CALL_S:g} s; see docs/restart_drill.md"
                )
            return printed

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
    """Nodes that a program injects faults into; all are repaired at the end. Raises DrillError if it does not start."""
    program = Program(words)
    nodes = Nodes(program, which)
    try:
        yield nodes
    finally:
        try:
            nodes.repair()
        finally:
            program.close()


class Nodes:
    """The nodes of a job. `which`: indices of the training nodes that faults are injected into."""

    def __init__(self, program: Program, which: Sequence[int]) -> None:
        self._program = program
        self.which = which
        self._faulty: dict[str, tuple[str, int]] = {}  # node -> (fault, cycle in which it was injected)
        self._lock = threading.Lock()

    def inject(self, fault: str, node: str, pid: int, cycle: int) -> None:
        """Raises DrillError if the program fails."""
        if fault in RANK_FAULTS:
            self.run(node, "kill", f"-{RANK_FAULTS[fault]}", str(pid))
            return
        with self._lock:
            self._faulty[node] = (fault, cycle)
        self._program.call(NODE_FAULTS[fault], node)

    @property
    def unreachable(self) -> set[str]:
        """Nodes that are lost or cut off."""
        with self._lock:
            return {node for node, (fault, _) in self._faulty.items() if fault in TAKES_A_SPARE}

    def repair(self, before: int | None = None) -> None:
        """Repair all nodes or, with `before`, those that are not lost and got their fault in an earlier cycle."""
        with self._lock:
            faulty = dict(self._faulty)
        for node, (fault, cycle) in faulty.items():
            if before is None or (fault != LOST and cycle < before):
                self._program.call("repair", node)
                with self._lock:
                    if self._faulty.get(node) == (fault, cycle):
                        del self._faulty[node]

    def run(self, node: str, *command: str) -> list[str]:
        """Run a command on a node. Returns the lines that it prints; raises DrillError if the program fails."""
        return self._program.call("run", node, shlex.join(command))

    def processes(self, node: str, text: str) -> list[str]:
        """The command lines of processes on a node that contain `text`."""
        return [line for line in self.run(node, "ps", "-eo", "args=") if text in line]


class LaunchOnNodes(Launch):
    """A launch with ranks on several nodes. They are found through their traces; `nodes` injects the faults."""

    def __init__(self, command: list[str], log_path: Path, echo: bool, nodes: Nodes, trace_dir: Path) -> None:
        super().__init__(command, log_path, echo)
        # Rank that ended with an error since the last fault -> (time at which the line arrived, the line).
        self._errors: dict[int, tuple[int, str]] = {}
        self._spares: set[int] = set()  # numbers of the spare nodes that wait to replace a lost node
        if os.environ.get("LAUNCHER") == FORK:
            try:
                make_secret()  # by which the drill may ask which saves hosts hold; the scripts take it
            except SecretError as error:
                raise DrillError(str(error)) from None
        self._nodes = nodes
        self._trace_dir = trace_dir
        self._locations: list[RankLocation] = []  # of the ranks of a cycle, in order
        self._hosts: set[str] = set()  # all that have run a rank
        # For the last fault: the last rank on the first faulty node, the number of ranks, and the time (monotonic, ns).
        self._faulty_rank = self._ranks_at_fault = self._injected_ns = 0

    def find_ranks(self, trace_dir: Path, cycle: int) -> bool:
        if self._found == cycle:
            return True
        world_size, ranks = recorded_ranks(trace_dir, cycle)
        self._locations = [location for _, location in sorted(ranks.items())]
        self._hosts |= {location.host for location in self._locations}
        self._found = cycle if 0 < world_size == len(ranks) else None
        return self._found is not None

    def inject(self, fault: str) -> int:
        """Inject a fault into nodes, or into the last rank on each. Returns the number of ranks; raises DrillError."""
        hosts = list(dict.fromkeys(location.host for location in self._locations))
        try:
            targets = [hosts[number] for number in self._nodes.which]
        except IndexError:
            raise DrillError(f"--node {self._nodes.which}: the ranks are on {len(hosts)} nodes") from None
        pids = [[location.pid for location in self._locations if location.host == host] for host in targets]
        self._faulty_rank = max(rank for rank, location in enumerate(self._locations) if location.host == targets[0])
        self._ranks_at_fault = len(self._locations)
        self._errors = {}
        self._injected_ns = now_ns()
        for host, mine in zip(targets, pids, strict=True):
            self._nodes.inject(fault, host, mine[-1], self._found or 0)
        return len(targets) if fault in RANK_FAULTS else sum(map(len, pids))

    def memory_saves(self) -> NodeMemorySaves:
        """The saves in the memory of the nodes that the last fault has left reachable."""
        return NodeMemorySaves(dict(enumerate(self._locations)), self._nodes.unreachable)

    def not_named(self) -> tuple[str, ...]:
        """A message for each rank that was running at the last fault and did not name the stopped rank."""
        named = self._ranks_that_named()
        others = set(range(self._ranks_at_fault)) - {self._faulty_rank}
        return tuple(
            f"rank {rank} did not name rank {self._faulty_rank}, which was stopped"
            for rank in sorted(others - set(named))
        )

    def named_s(self) -> float | None:
        """Seconds from the stop of a rank until the last of the others that named it had done so; None if none did."""
        times_ns = [at_ns for rank, at_ns in self._ranks_that_named().items() if rank != self._faulty_rank]
        return (max(times_ns) - self._injected_ns) / 1e9 if times_ns else None

    def _ranks_that_named(self) -> dict[int, int]:
        """The ranks whose error names the stopped rank, with the time at which that line arrived (monotonic, ns)."""
        named = re.compile(rf"\brank {self._faulty_rank} (on \S+ does not answer|never came)")
        return {rank: at_ns for rank, (at_ns, error) in list(self._errors.items()) if named.search(error)}

    def _on_line(self, line: bytes) -> None:
        # What libraries and other programs print may not have ended its line when a message comes.
        found = _ERROR_OF_RANK.search(line)
        if found is not None:
            self._errors[int(found[1])] = (now_ns(), line.decode(errors="replace"))
        spare = _SPARE.search(line)
        if spare is not None:
            (self._spares.add if spare[2] else self._spares.discard)(int(spare[1]))

    def await_spare(self, limit_s: float) -> None:
        """Wait until a spare node can replace a lost one. Raises DrillError after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not self._spares:
            if time.monotonic() > deadline or self.exit_code is not None:
                raise DrillError(f"no spare has joined within {limit_s:g} s; see {self.log_path}")
            time.sleep(_POLL_S)

    def coordinator(self) -> list[psutil.Process]:
        """The process on this host that starts and ends the ranks on all nodes."""
        found = []
        for process in self.everything():
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have ended since
                if "coordinate" in process.cmdline():
                    found.append(process)
        return found

    def wait_until_gone(self, time_limit_s: float) -> None:
        """Also waits on all nodes that have run ranks. Repairs them first, so that a node cut off learns of the end."""
        self._nodes.repair()
        super().wait_until_gone(time_limit_s)
        deadline = time.monotonic() + time_limit_s
        for host in sorted(self._hosts):
            while left := self._nodes.processes(host, str(self._trace_dir)):
                if time.monotonic() > deadline:
                    raise DrillError(f"{len(left)} processes outlived the launch on {host}: {left[0][:200]}")
                time.sleep(_POLL_S)
