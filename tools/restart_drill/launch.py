"""A launch of a training command: finds, watches and ends all of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

from restart_trace.clock import boot_id, now_ns
from restart_trace.schema import RANK_FILE_PATTERN

from ..common.environments import has_variable

MARK_VARIABLE = "RESTART_BENCH_MARK"
LAUNCH_ID_VARIABLE = "RESTART_TRACE_LAUNCH_ID"
COPIES_VARIABLE = "MEGATRON_MEMORY_COPIES"
GRACE_S = 20.0  # for what a launcher leaves behind, such as resource trackers
POLL_S = 0.05
# What torchrun's agent logs when it finds that a rank has failed (torch.distributed.elastic.multiprocessing.api).
_AGENT_SAW_A_FAILURE = re.compile(rb"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\)")


AnyLaunch = TypeVar("AnyLaunch", bound="Launch")


class DrillError(Exception):
    """The fault could not be injected, or the job did not end as it should have."""


class Launch:
    """One run of the command. All processes that it starts, directly or not, carry a mark in their environment.

    `find_ranks` reads from the restart trace which of them are ranks.
    """

    def __init__(self, command: list[str], log_path: Path, echo: bool) -> None:
        self.log_path = log_path
        self.id = self._mark = uuid.uuid4().hex  # in LAUNCH_ID_VARIABLE of its processes on all hosts
        self._command = command
        self._launcher: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._read_output, args=(log_path,), daemon=True)
        self._echo = self._wants_echo = echo
        # When the agent's first line on a failure arrived, since `expect_failure` (monotonic, ns).
        self.agent_saw_ns: int | None = None
        self._found: int | None = None  # the cycle whose ranks are all known
        self._ranks: list[psutil.Process] = []
        self._of_ranks: set[psutil.Process] = set()

    def start(self) -> None:
        """Run the command."""
        environment = os.environ | {MARK_VARIABLE: self._mark, LAUNCH_ID_VARIABLE: self._mark}
        # An outer launcher may have set these; the command's own launcher must not read them.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            environment.pop(name, None)
        self._launcher = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader.start()

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._launcher is not None
        return self._launcher

    def _read_output(self, log_path: Path) -> None:
        output = self._started.stdout
        assert output is not None
        with log_path.open("wb") as log:
            for line in output:
                log.write(line)
                log.flush()
                if self.agent_saw_ns is None and _AGENT_SAW_A_FAILURE.search(line):
                    self.agent_saw_ns = now_ns()
                self._on_line(line)
                if self._echo:
                    sys.stdout.write(line.decode(errors="replace"))
                    sys.stdout.flush()

    def _on_line(self, line: bytes) -> None:
        """Called with each line of output; subclasses override it."""

    def expect_failure(self) -> None:
        """Reset `agent_saw_ns` for a new failure, and only log the output until `has_recovered`.

        A launcher prints long reports of lost ranks, which would hide the drill's own lines.
        """
        self._echo = False
        self.agent_saw_ns = None

    def has_recovered(self) -> None:
        """Show the output again after a failure."""
        self._echo = self._wants_echo
        self.agent_saw_ns = None

    def find_ranks(self, trace_dir: Path, cycle: int) -> bool:
        """Find the ranks of `cycle` by their records. Returns whether all have written one and this host's were found.

        Done before the injection point is reached, so that the fault is not late.
        """
        if self._found == cycle:
            return True
        world_size, ranks = recorded_ranks(trace_dir, cycle)
        here = boot_id()
        # Signals reach no other host.
        pids = [location.pid for _, location in sorted(ranks.items()) if location.boot_id == here]
        self._ranks = []
        for pid in pids:
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                # Without the mark, the pid has been reused by another process.
                if has_variable(pid, MARK_VARIABLE, self._mark):
                    self._ranks.append(process)
        self._of_ranks = set(self._ranks)
        all_known = 0 < world_size == len(ranks) and 0 < len(pids) == len(self._ranks)
        self._found = cycle if all_known else None
        return self._found is not None

    def await_ranks(self, trace_dir: Path, cycle: int, limit_s: float, ended: Callable[[], bool]) -> None:
        """Wait until all ranks of `cycle` are found or the job has `ended`. Raises DrillError after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not self.find_ranks(trace_dir, cycle) and not ended():
            if time.monotonic() > deadline:
                raise DrillError(
                    f"not all ranks of cycle {cycle} had written to {trace_dir} within {limit_s:g} s; raise "
                    "--time-limit"
                )
            time.sleep(0.002)

    def ranks(self) -> list[psutil.Process]:
        """The living ranks that were found, in order of rank."""
        return _living(self._ranks)

    def of_ranks(self) -> list[psutil.Process]:
        """The ranks and their descendants. Those of a dead rank are known only from a call while it still lived."""
        for process in self.ranks():
            with contextlib.suppress(psutil.Error):
                self._of_ranks.update(process.children(recursive=True))
        return _living(self._of_ranks)

    @property
    def pid(self) -> int:
        """The process id of the command itself, which is the launcher."""
        return self._started.pid

    def launcher(self) -> list[psutil.Process]:
        """The process of the command itself, if it lives."""
        return _living([psutil.Process(self.pid)]) if self.exit_code is None else []

    def everything(self) -> list[psutil.Process]:
        """All living processes of the launch."""
        return [one for one in psutil.process_iter() if has_variable(one.pid, MARK_VARIABLE, self._mark)]

    def send(self, signum: int, processes: list[psutil.Process]) -> int:
        """Send a signal to those that still live. Returns their number."""
        sent = 0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
                sent += 1
        return sent

    def kill(self, which: Callable[[Launch], list[psutil.Process]]) -> int:
        """SIGKILL what `which` finds until it finds nothing. Returns the number of processes.

        The ranks are stopped first, so that they start nothing while their descendants are searched for.
        """
        self.send(signal.SIGSTOP, self.ranks())
        killed: set[int] = set()
        while found := which(self):
            self.send(signal.SIGKILL, found)
            killed |= {process.pid for process in found}
            time.sleep(0.01)  # not psutil's wait, which would reap the launcher and lose its exit code for Popen
        return len(killed)

    @property
    def exit_code(self) -> int | None:
        """The launcher's exit code; None while it runs."""
        return self._started.poll()

    def wait(self, time_limit_s: float) -> int:
        """Wait for the launcher's exit code. Raises DrillError if the time passes first."""
        try:
            return self._started.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            message = f"the command had not ended after {time_limit_s:g} s; raise --time-limit"
            raise DrillError(message) from None

    def wait_until_gone(self, time_limit_s: float) -> None:
        """Wait until no process of the launch is left. Raises DrillError if the time passes first."""
        deadline = time.monotonic() + time_limit_s
        while left := self.everything():
            if time.monotonic() > deadline:
                shown = ", ".join(f"{process.pid} ({name})" for process, name in named(left[:8]))
                raise DrillError(f"{len(left)} processes outlived the launch by {time_limit_s:g} s: {shown}")
            time.sleep(POLL_S)
        self._reader.join(time_limit_s)

    def clean_up(self) -> None:
        """SIGKILL all remaining processes of the launch."""
        while left := self.everything():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=POLL_S)
        if self._launcher is not None:
            self._launcher.wait()
        if self._reader.is_alive():
            self._reader.join(1.0)


class RankLocation(NamedTuple):
    """Where a rank runs, according to its first record. `pid` is in the pid namespace of its host.

    `copies`: ADDRESS:PORT of the process on its host that holds saves in memory; empty if there is none.
    """

    pid: int
    boot_id: str
    host: str
    coordinates: tuple[int, ...] = ()  # (tp, pp, dp) as checkpoints number them
    launch_id: str = ""
    copies: str = ""


def recorded_ranks(trace_dir: Path, cycle: int) -> tuple[int, dict[int, RankLocation]]:
    """(world size, location by rank) of the ranks that have written a record of `cycle`; (0, {}) if none has yet."""
    world_size, ranks = 0, {}
    for path in trace_dir.glob(RANK_FILE_PATTERN.replace("{rank:05d}", "*").format(cycle=cycle)):
        with path.open("rb") as file:
            line = file.readline()
        first = json.loads(line) if line.endswith(b"\n") else {}
        if "pid" in first:
            world_size = first["world_size"]
            parts = first.get("layout", {}).get("cp", 1)  # ranks of one sequence are data-parallel in checkpoints
            dp = first.get("dp", 0) * parts + first.get("cp", 0)
            coordinates = first.get("tp", 0), first.get("pp", 0), dp
            environment = first.get("environment", {})
            variables = environment.get(LAUNCH_ID_VARIABLE, ""), environment.get(COPIES_VARIABLE, "")
            process = first["pid"], first["boot_id"], first.get("host", "")
            ranks[first["rank"]] = RankLocation(*process, coordinates, *variables)
    return world_size, ranks


def _living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run, without zombies and without other processes that have reused a pid."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def named(processes: Iterable[psutil.Process]) -> list[tuple[psutil.Process, str]]:
    """(process, its name) of the processes that are still there; one that has been found may have ended since."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append((process, process.name()))
    return found


@contextlib.contextmanager
def launched(command: list[str], log_path: Path, echo: bool = True) -> Iterator[Launch]:
    """A running launch; when the context ends none of its processes is left."""
    with cleaned_up(Launch(command, log_path, echo)) as launch:
        yield launch


@contextlib.contextmanager
def cleaned_up(launch: AnyLaunch) -> Iterator[AnyLaunch]:
    """`launch`, started; when the context ends, a signal as it starts included, none of its processes is left."""
    try:
        launch.start()
        yield launch
    finally:
        launch.clean_up()
