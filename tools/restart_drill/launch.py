"""One launch of a training command, all of whose processes can be found, watched and ended."""

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
    """One run of the command. All its processes, however far removed, carry a mark in their environment.

    Which of them are ranks is read from the restart trace: `find_ranks`.
    """

    def __init__(self, command: list[str], log_path: Path, echo: bool) -> None:
        self.log_path = log_path
        self._mark = uuid.uuid4().hex
        environment = os.environ | {MARK_VARIABLE: self._mark, LAUNCH_ID_VARIABLE: self._mark}
        # Of an outer launcher; the command's own launcher must not take them for its own.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            environment.pop(name, None)
        self._launcher = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._echo = self._wants_echo = echo
        # When the agent's first line on a failure arrived, since `expect_failure` (monotonic, ns).
        self.agent_saw_ns: int | None = None
        self._found: int | None = None  # the cycle all of whose ranks are known
        self._ranks: list[psutil.Process] = []
        self._of_ranks: set[psutil.Process] = set()
        self._reader = threading.Thread(target=self._read_output, args=(log_path,), daemon=True)
        self._reader.start()

    def _read_output(self, log_path: Path) -> None:
        assert self._launcher.stdout is not None
        with log_path.open("wb") as log:
            for line in self._launcher.stdout:
                log.write(line)
                log.flush()
                if self.agent_saw_ns is None and _AGENT_SAW_A_FAILURE.search(line):
                    self.agent_saw_ns = now_ns()
                self._heard(line)
                if self._echo:
                    sys.stdout.write(line.decode(errors="replace"))
                    sys.stdout.flush()

    def _heard(self, line: bytes) -> None:
        """A line of output has arrived; for launches that look at more of it."""

    def expect_failure(self) -> None:
        """From here on `agent_saw_ns` is of a new failure.

        What a launcher says of lost ranks is long and hides what matters: output is only logged until `has_recovered`.
        """
        self._echo = False
        self.agent_saw_ns = None

    def has_recovered(self) -> None:
        """The failure is dealt with: output is passed on again."""
        self._echo = self._wants_echo
        self.agent_saw_ns = None

    def find_ranks(self, trace_dir: Path, cycle: int) -> bool:
        """Look for the ranks of `cycle` in their records; whether all have written one, and this host's are found.

        To strike fast, this is done before the injection point comes.
        """
        if self._found == cycle:
            return True
        world_size, ranks = recorded_ranks(trace_dir, cycle)
        here = boot_id()
        pids = [place.pid for _, place in sorted(ranks.items()) if place.boot_id == here]  # signals reach no other host
        self._ranks = []
        for pid in pids:
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                # Without the mark, the number is another process's by now.
                if process.environ().get(MARK_VARIABLE) == self._mark:
                    self._ranks.append(process)
        self._of_ranks = set(self._ranks)
        all_known = 0 < world_size == len(ranks) and 0 < len(pids) == len(self._ranks)
        self._found = cycle if all_known else None
        return self._found is not None

    def await_ranks(self, trace_dir: Path, cycle: int, limit_s: float, ended: Callable[[], bool]) -> None:
        """Return when all ranks of `cycle` are found, or the job has `ended`. Raises DrillError after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not self.find_ranks(trace_dir, cycle) and not ended():
            if time.monotonic() > deadline:
                raise DrillError(
                    f"not all ranks of cycle {cycle} had written to {trace_dir} within {limit_s:g} s; raise "
                    "--time-limit"
                )
            time.sleep(0.002)

    def ranks(self) -> list[psutil.Process]:
        """The ranks that were found and live, in order of rank."""
        return _living(self._ranks)

    def of_ranks(self) -> list[psutil.Process]:
        """The ranks and what they have started, as far as it was there at the last call while they lived."""
        for process in self.ranks():
            with contextlib.suppress(psutil.Error):
                self._of_ranks.update(process.children(recursive=True))
        return _living(self._of_ranks)

    def not_named(self) -> tuple[str, ...]:
        """What is wrong with what the ranks said of one that was stopped; only faults of nodes look at that."""
        return ()

    def named_s(self) -> float | None:
        """Seconds from the stop of a rank until all others had named it, or those that did; None if none did."""
        return None

    @property
    def pid(self) -> int:
        """Of the process that was started with the command."""
        return self._launcher.pid

    def launcher(self) -> list[psutil.Process]:
        """The process that was started with the command."""
        return _living([psutil.Process(self._launcher.pid)]) if self._launcher.poll() is None else []

    def everything(self) -> list[psutil.Process]:
        """All living processes of the launch."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK_VARIABLE) == self._mark:
                    found.append(process)
        return found

    def send(self, signum: int, processes: list[psutil.Process]) -> int:
        """Send a signal to those that still live; how many that were."""
        sent = 0
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
                sent += 1
        return sent

    def kill(self, which: Callable[[Launch], list[psutil.Process]]) -> int:
        """SIGKILL what `which` finds until it finds nothing; how many processes that were.

        The ranks are stopped first: they stay where they are while what they have started is looked for.
        """
        self.send(signal.SIGSTOP, self.ranks())
        killed: set[int] = set()
        while found := which(self):
            self.send(signal.SIGKILL, found)
            killed |= {process.pid for process in found}
            time.sleep(0.01)  # not psutil's wait: that would take the launcher's exit code away from Popen
        return len(killed)

    @property
    def exit_code(self) -> int | None:
        """Of the launcher; None while it runs."""
        return self._launcher.poll()

    def wait(self, time_limit_s: float) -> int:
        """Exit code of the launcher. Raises DrillError if the time passes first."""
        try:
            return self._launcher.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            message = f"the command had not ended after {time_limit_s:g} s; raise --time-limit"
            raise DrillError(message) from None

    def wait_until_gone(self, time_limit_s: float) -> None:
        """Return when no process of the launch is left. Raises DrillError if the time passes first."""
        deadline = time.monotonic() + time_limit_s
        while left := self.everything():
            if time.monotonic() > deadline:
                shown = ", ".join(f"{process.pid} ({process.name()})" for process in left[:8])
                raise DrillError(f"{len(left)} processes outlived it by {time_limit_s:g} s: {shown}")
            time.sleep(POLL_S)
        self._reader.join(time_limit_s)

    def clean_up(self) -> None:
        """SIGKILL whatever is left of the launch."""
        while left := self.everything():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=POLL_S)
        self._launcher.wait()
        self._reader.join(1.0)


class Place(NamedTuple):
    """Where a rank runs, as its first record tells. `pid`: as its host numbers processes. `at`: its coordinates.

    `copies`: ADDRESS:PORT of its host's process that holds saves in memory; empty without one.
    """

    pid: int
    boot_id: str
    host: str
    at: tuple[int, ...] = ()  # (tp, pp, dp)
    launch_id: str = ""
    copies: str = ""


def recorded_ranks(trace_dir: Path, cycle: int) -> tuple[int, dict[int, Place]]:
    """(world size, rank -> its place) of the ranks that trace `cycle`; 0 if none does yet."""
    world_size, ranks = 0, {}
    for path in trace_dir.glob(RANK_FILE_PATTERN.replace("{rank:05d}", "*").format(cycle=cycle)):
        with path.open("rb") as file:
            line = file.readline()
        first = json.loads(line) if line.endswith(b"\n") else {}
        if "pid" in first:
            world_size = first["world_size"]
            at, environment = tuple(first.get(name, 0) for name in ("tp", "pp", "dp")), first.get("environment", {})
            told = environment.get(LAUNCH_ID_VARIABLE, ""), environment.get(COPIES_VARIABLE, "")
            ranks[first["rank"]] = Place(first["pid"], first["boot_id"], first.get("host", ""), at, *told)
    return world_size, ranks


def _living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that run; a zombie is none, and neither is another process that has got the id of one."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def launched(command: list[str], log_path: Path, echo: bool = True) -> Iterator[Launch]:
    """A running launch of which nothing is left at the end."""
    with cleaned_up(Launch(command, log_path, echo)) as launch:
        yield launch


@contextlib.contextmanager
def cleaned_up(launch: AnyLaunch) -> Iterator[AnyLaunch]:
    """`launch`, of which nothing is left at the end."""
    try:
        yield launch
    finally:
        launch.clean_up()
