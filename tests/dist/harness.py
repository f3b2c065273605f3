"""What the multi-process tests are written with: start ranks, read what they said and recorded."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from restart_trace.reading import read_records
from tests.dist.forked_writers import ForkServer, fork_connection
from tools.common.environments import has_variable

ROOT = Path(__file__).resolve().parents[2]
HANGS_S = 300.0  # what has not come by then never will; no test passes or fails by how soon a thing comes

LLAMA_STYLE = [
    "--use-rotary-position-embeddings", "--untie-embeddings-and-output-weights", "--swiglu",
    "--normalization", "rmsnorm", "--disable-bias-linear",
]  # fmt: skip
EXPERTS = ["--num-experts", "4"]  # of every second layer
BLOOM_STYLE = ["--position-embedding-type", "alibi", "--embed-layernorm"]


@dataclass
class Run:
    """A finished launch."""

    exit_codes: list[int]
    log_dir: Path
    pids: list[int]

    @property
    def ok(self) -> bool:
        return all(code == 0 for code in self.exit_codes)

    def log(self, rank: int = 0) -> str:
        return (self.log_dir / f"rank_{rank}.log").read_text()

    @property
    def output(self) -> str:
        """What all ranks printed, rank by rank."""
        return "\n".join(path.read_text() for path in sorted(self.log_dir.glob("rank_*.log")))


@dataclass
class Zygote:
    """Handle of tests/dist/zygote.py; one per test session."""

    process: subprocess.Popen[bytes]
    _connection: socket.socket
    _runs: int = field(default=0)

    @staticmethod
    def start(wrapper: Sequence[str] = (), imports: Sequence[str] = ()) -> Zygote:
        """Start it, under the command `wrapper` (a tracer, say) if one is given; it imports `imports` besides."""
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": "1"}
        ours, theirs = fork_connection()
        with theirs:
            process = subprocess.Popen(
                [*wrapper, sys.executable, str(Path(__file__).with_name("zygote.py")), str(theirs.fileno()), *imports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # an answer that was read along with the one before would not make the pipe readable
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        return Zygote(process, ours)

    @functools.cached_property
    def forks(self) -> ForkServer:
        """Forks helper processes for this one, from a process that has torch and DeepSpeed imported and no threads."""
        self._ask({"forks": True})
        self._answer(HANGS_S)
        return ForkServer(self._connection)

    def close(self) -> None:
        self._connection.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=HANGS_S)

    def run(
        self,
        argv: list[str],
        nproc: int,
        log_dir: Path,
        *,
        env: dict[str, str] | None = None,
        timeout: float = HANGS_S,
        during: Callable[[list[int]], None] | None = None,
        script: str | None = None,
        launcher: bool = False,
    ) -> Run:
        """Run `nproc` ranks to their end. `during(pids)` is called once they run, to do them harm.

        `script` is run instead of pretrain_gpt.py. With `launcher` the other ranks get SIGTERM when one fails, as
        from torchrun. Ranks that are still there after `timeout` seconds are killed and the test fails.
        """
        self._runs += 1
        directory = log_dir / f"run_{self._runs:03d}"
        directory.mkdir(parents=True)
        request = {
            "argv": argv,
            "env": env or {},
            "nproc": nproc,
            "log_dir": str(directory),
            "script": script,
            "launcher": launcher,
        }
        self._ask(request)
        pids: list[int] = []
        try:
            pids = self._answer(HANGS_S)["pids"]
            if during is not None:
                during(pids)
            try:
                return Run(self._answer(timeout)["exit_codes"], directory, pids)
            except TimeoutError:
                output = Run([], directory, pids).output
                raise AssertionError(f"ranks still ran after {timeout} s; their output:\n{output}") from None
        except BaseException:  # leave no rank behind, and the zygote ready for the next test
            kill_all(pids or self._answer(HANGS_S)["pids"])
            self._answer(HANGS_S)
            raise

    def call(self, function: Callable[..., None], log_dir: Path, *paths: Path, ranks: int = 1) -> None:
        """Call a function of a module in a process of its own, which has torch and DeepSpeed imported, or in several.

        As ranks of one job they find each other by their environment.
        """
        argv = [function.__module__, function.__name__, *map(str, paths)]
        run = self.run(argv, ranks, log_dir, script=str(Path(__file__).with_name("scripts") / "call_function.py"))
        assert run.ok, run.output[-6000:]

    def _ask(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        if not ready:
            raise TimeoutError
        line = self.process.stdout.readline()
        assert line, "the zygote died"
        return json.loads(line)


def kill_all(pids: list[int]) -> None:
    """SIGKILL every one of our ranks that is still there, all of them stopped before: none sees another one gone."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def runs(pid: int) -> bool:
    """Whether the process runs. One that has ended may still have to be reaped, which may happen at any moment."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_with(name: str, value: str) -> list[psutil.Process]:
    """Processes in whose environment the variable `name` is `value`; none that has ended and is not reaped yet.

    For tests that poll: psutil takes five times as long for the environments of all processes.
    """
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        if has_variable(pid, name, value):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
    return found


def end_all(left: Callable[[], list[psutil.Process]]) -> None:
    """SIGKILL what `left` finds until it finds nothing: some end with others, and some have just been started."""
    while found := left():
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)  # not psutil's wait, which would reap a process of subprocess.Popen and lose its exit code


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll `condition` every 20 ms; one that takes longer than 2 ms, with pauses of nine times as long.

    Most tests wait most of their time: polling every millisecond took a fiftieth of a processor for each of them.
    """
    deadline = time.monotonic() + HANGS_S
    while True:
        asked = time.monotonic()
        if condition():
            return
        answered = time.monotonic()
        assert answered < deadline, f"{what} did not happen within {HANGS_S:g} s"
        time.sleep(min(max(0.02, 9 * (answered - asked)), 0.2))


class Starvation:
    """Seconds since it was made for which some process of this machine was ready, and waited for a processor.

    For bounds on durations: what a busy machine adds is taken off. 0 where the kernel does not tell (no PSI).
    """

    def __init__(self) -> None:
        self._began_us = self._total_us()

    @property
    def seconds(self) -> float:
        return (self._total_us() - self._began_us) / 1e6

    @classmethod
    @contextmanager
    def noted(cls) -> Iterator[Callable[[float, float], float]]:
        """Gives a function of two moments (monotonic, s) of the time of the body: the seconds of it between them."""
        made, ended, notes = cls(), threading.Event(), [(0.0, 0.0)]

        def note() -> None:
            while not ended.wait(0.05):
                notes.append((time.monotonic(), made.seconds))

        thread = threading.Thread(target=note, daemon=True)
        thread.start()
        try:
            yield (
                lambda begin, end: (
                    next((busy for at, busy in notes if at >= end), notes[-1][1])
                    - max(busy for at, busy in notes if at <= begin)
                )
            )
        finally:
            ended.set()
            thread.join()

    def _total_us(self) -> int:
        try:
            some = Path("/proc/pressure/cpu").read_text().split("\n")[0]
        except OSError:
            return 0
        return int(some.rpartition("total=")[2])


def records(trace_dir: Path, cycle: int | None = None, rank: int | None = None) -> list[dict[str, Any]]:
    """Completed records of a trace directory; a torn last line is left out."""
    found = []
    for path in sorted(trace_dir.glob("rank_*_cycle_*.jsonl")):
        match = re.match(r"rank_(\d+)_cycle_(\d+)", path.name)
        assert match
        if (rank is not None and int(match[1]) != rank) or (cycle is not None and int(match[2]) != cycle):
            continue
        found += read_records(path)
    return found


def losses(trace_dir: Path, cycle: int | None = None, rank: int = 0) -> dict[int, float]:
    """Iteration -> training loss with all its bits, as `rank` recorded it."""
    return {r["step"]: r["loss"] for r in records(trace_dir, cycle, rank) if r["type"] == "iteration"}
