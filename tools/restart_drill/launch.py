"""One launch of a training command, all of whose processes can be found, watched and ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from restart_trace.clock import now_ns

MARK_VARIABLE = "RESTART_BENCH_MARK"
LAUNCH_ID_VARIABLE = "RESTART_TRACE_LAUNCH_ID"
_ATTEMPT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
POLL_S = 0.05
# What torchrun's agent logs when it finds that a rank has failed (torch.distributed.elastic.multiprocessing.api).
_AGENT_SAW_A_FAILURE = re.compile(rb"failed \(exitcode: -?\d+\) local_rank: \d+ \(pid: \d+\)")


class DrillError(Exception):
    """The fault could not be injected, or the job did not end as it should have."""


class Launch:
    """One run of the command. All its processes, however far removed, carry a mark in their environment."""

    def __init__(self, command: list[str], log_path: Path, echo: bool) -> None:
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
        self._everything: list[psutil.Process] = []
        self._of_ranks: list[psutil.Process] = []
        self._ranks: list[psutil.Process] = []
        self._attempts: dict[int, str | None] = {}  # pid -> which restart in place it is of
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
                if self._echo:
                    sys.stdout.write(line.decode(errors="replace"))
                    sys.stdout.flush()

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

    def look(self) -> None:
        """Find out which processes there are: to strike fast, this is done before the moment comes."""
        found = self._processes()
        self._everything = [process for process, _ in found]
        self._attempts = {process.pid: environment.get(_ATTEMPT_VARIABLE) for process, environment in found}
        with_rank = {process.pid: (process, int(env["RANK"])) for process, env in found if "RANK" in env}
        own = []
        for process, rank in with_rank.values():
            with contextlib.suppress(psutil.Error, OSError):
                if process.ppid() not in with_rank:
                    own.append((rank, process))
        self._of_ranks = [process for process, _ in with_rank.values()]
        self._ranks = [process for _, process in sorted(own, key=lambda item: item[0])]

    def everything(self) -> list[psutil.Process]:
        """All processes of the launch, as of the last `look`; those that have ended are left out."""
        return _living(self._everything)

    def of_ranks(self) -> list[psutil.Process]:
        """Those to which the launcher gave a RANK: the ranks, and what they started themselves."""
        return _living(self._of_ranks)

    def ranks(self) -> list[psutil.Process]:
        """The ranks themselves, in order of rank."""
        return _living(self._ranks)

    def launcher(self) -> list[psutil.Process]:
        """The process that was started with the command."""
        return _living([psutil.Process(self._launcher.pid)]) if self._launcher.poll() is None else []

    def of_attempt(self, number: int) -> list[psutil.Process]:
        """Those of ranks that torchrun's agent has started in its `number`-th attempt, from 0; looks anew."""
        self.look()
        return [process for process in self.of_ranks() if self._attempts.get(process.pid) == str(number)]

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

        Ranks of a later attempt are left alone: an agent may have restarted them already.
        """
        killed: set[int] = set()
        attempts = {self._attempts.get(process.pid) for process in which(self)}
        while found := [process for process in which(self) if self._attempts.get(process.pid) in attempts]:
            self.send(signal.SIGKILL, found)
            killed |= {process.pid for process in found}
            time.sleep(0.01)  # not psutil's wait: that would take the launcher's exit code away from Popen
            self.look()
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
        while left := [process for process, _ in self._processes()]:
            if time.monotonic() > deadline:
                shown = ", ".join(f"{process.pid} ({process.name()})" for process in left[:8])
                raise DrillError(f"{len(left)} processes outlived it by {time_limit_s:g} s: {shown}")
            time.sleep(POLL_S)
        self._reader.join(time_limit_s)

    def clean_up(self) -> None:
        """SIGKILL whatever is left of the launch."""
        while left := [process for process, _ in self._processes()]:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=POLL_S)
        self._launcher.wait()
        self._reader.join(1.0)

    def _processes(self) -> list[tuple[psutil.Process, dict[str, str]]]:
        """Living processes of the launch, each with its environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environment = process.environ()
                if environment.get(MARK_VARIABLE) == self._mark:
                    found.append((process, environment))
        return found


def _living(processes: list[psutil.Process]) -> list[psutil.Process]:
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
    launch = Launch(command, log_path, echo)
    try:
        yield launch
    finally:
        launch.clean_up()
