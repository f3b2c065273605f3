"""Run a training command, SIGKILL all its ranks when it reports an iteration, and run it again.

    python kill_at_iteration.py --iteration 8 --log-dir DIR [--trace-dir DIR] -- COMMAND...

Each launch's output is passed through, up to the kill, and kept as DIR/cycle_000.log and DIR/cycle_001.log.
The fault and what followed from it go into the trace directory as failure records. Every process that is left
of a launch when it should have ended, or when a time limit passes, is killed; no other process is touched.

Exit code 0: the fault was injected and the second launch ended with 0. 1: something else happened, and the
last line says what.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
from iteration_log import parse_line

ROOT = Path(__file__).resolve().parents[2]
MARK_VARIABLE = "RESTART_BENCH_MARK"
LAUNCH_ID_VARIABLE = "RESTART_TRACE_LAUNCH_ID"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 20.0  # for what a launcher leaves behind, such as resource trackers
POLL_S = 0.05

RecordFailure = Callable[[str], None]


class DrillError(Exception):
    """The fault could not be injected, or the job did not end as it should have."""


class Launch:
    """One run of the command. All its processes, however far removed, carry a mark in their environment."""

    def __init__(self, command: list[str], log_path: Path) -> None:
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
        self._reported: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._echo = True
        self._reader = threading.Thread(target=self._read_output, args=(log_path,), daemon=True)
        self._reader.start()

    def _read_output(self, log_path: Path) -> None:
        assert self._launcher.stdout is not None
        with log_path.open("wb") as log:
            for line in self._launcher.stdout:
                log.write(line)
                log.flush()
                text = line.decode(errors="replace")
                if self._echo:
                    sys.stdout.write(text)
                    sys.stdout.flush()
                reported = parse_line(text)
                if reported is not None:
                    self._reported.put(reported.iteration)

    def wait_for_iteration(self, iteration: int, time_limit_s: float) -> None:
        """Return when `iteration` is reported.

        Raises DrillError if the command ends or the time passes first.
        """
        deadline = time.monotonic() + time_limit_s
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                if self._reported.get(timeout=POLL_S) >= iteration:
                    return
                continue  # what was printed before the end is looked at before the end is
            if self._launcher.poll() is not None and not self._reader.is_alive() and self._reported.empty():
                code = self._launcher.returncode
                fix = "see its output above" if code else "choose an iteration that it reaches"
                raise DrillError(
                    f"the command ended with exit code {code} before it reported iteration {iteration}; {fix}"
                )
        raise DrillError(
            f"iteration {iteration} was not reported within {time_limit_s:g} s; raise --time-limit"
        )

    def kill_ranks(self) -> int:
        """SIGKILL every rank; returns how many processes that were.

        What a launcher says of lost ranks is long and hides what matters: from here on output is only logged.
        Ranks are what the launcher gave a RANK; whatever they started themselves inherited it.
        """
        self._echo = False
        killed: set[int] = set()
        while ranks := self._processes(lambda environment: "RANK" in environment):
            for process in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            killed |= {process.pid for process in ranks}
            psutil.wait_procs(ranks, timeout=POLL_S)
        return len(killed)

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
        while left := self._processes():
            if time.monotonic() > deadline:
                shown = ", ".join(f"{process.pid} ({process.name()})" for process in left[:8])
                raise DrillError(f"{len(left)} processes outlived it by {time_limit_s:g} s: {shown}")
            time.sleep(POLL_S)
        self._reader.join(time_limit_s)

    def clean_up(self) -> None:
        """SIGKILL whatever is left of the launch."""
        while left := self._processes():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=POLL_S)
        self._launcher.wait()
        self._reader.join(1.0)

    def _processes(self, which: Callable[[dict[str, str]], bool] = bool) -> list[psutil.Process]:
        """Living processes of the launch whose environment `which` accepts."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environment = process.environ()
                if environment.get(MARK_VARIABLE) == self._mark and which(environment):
                    found.append(process)
        return found


def import_trace() -> tuple[Any, Any]:
    """What writes failure records. Imported only for that, from this checkout."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from megatron.restart_trace import cycles
    from megatron.restart_trace.supervisor import open_supervisor_trace

    return cycles, open_supervisor_trace


@contextlib.contextmanager
def failure_records(trace_dir: Path | None, iteration: int) -> Iterator[RecordFailure]:
    """A function that writes a failure record of a phase, now; one that does nothing without `trace_dir`."""
    if trace_dir is None:
        yield lambda phase: None
        return
    cycles, open_supervisor_trace = import_trace()
    failed: list[int] = []

    with open_supervisor_trace(trace_dir) as trace:

        def record(phase: str) -> None:
            if not failed:
                newest = cycles.newest_cycle(trace_dir)
                if newest is None:
                    raise DrillError(f"--trace-dir {trace_dir}: the command writes no trace there")
                failed.append(newest[0])
            trace.failure(phase, cycle=failed[0], detail="sigkill-all", iteration=iteration)

        yield record


@contextlib.contextmanager
def launched(command: list[str], log_path: Path) -> Iterator[Launch]:
    """A running launch of which nothing is left at the end."""
    launch = Launch(command, log_path)
    try:
        yield launch
    finally:
        launch.clean_up()


def run_drill(
    command: list[str], iteration: int, log_dir: Path, trace_dir: Path | None, limit_s: float
) -> None:
    """Launch, kill at `iteration`, launch again. Raises DrillError."""
    log_dir.mkdir(parents=True, exist_ok=True)
    if trace_dir is not None:
        import_trace()  # now, so that it does not delay the kill
    with contextlib.ExitStack() as stack:
        with launched(command, log_dir / "cycle_000.log") as launch:
            launch.wait_for_iteration(iteration, limit_s)
            record = stack.enter_context(failure_records(trace_dir, iteration))
            record("injected")
            killed = launch.kill_ranks()
            say(f"iteration {iteration} was reported: SIGKILL to {killed} ranks")
            if killed == 0:
                raise DrillError("no process of the command has RANK in its environment; nothing was killed")
            exit_code = launch.wait(limit_s)
            record("detected")
            if exit_code == 0:
                raise DrillError("the launcher ended with exit code 0 though its ranks were killed")
            launch.wait_until_gone(GRACE_S)
            record("stopped")
        say(f"the launcher ended with exit code {exit_code} and no process is left; launching again")
        record("relaunched")
        with launched(command, log_dir / "cycle_001.log") as launch:
            exit_code = launch.wait(limit_s)
            if exit_code != 0:
                raise DrillError(f"the second launch ended with exit code {exit_code}")
            launch.wait_until_gone(GRACE_S)


def say(text: str) -> None:
    print(f"[kill_at_iteration] {text}", file=sys.stderr, flush=True)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iteration", type=int, required=True, help="kill when this iteration is reported")
    parser.add_argument("--log-dir", type=Path, required=True, help="where the output of each launch is kept")
    parser.add_argument("--trace-dir", type=Path, help="restart trace directory of the command")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds for each step (300)")
    parser.add_argument("command", nargs="+", help="the training command, after --")
    args = parser.parse_args(argv)
    if args.iteration < 1:
        parser.error(f"--iteration {args.iteration}: must be at least 1")
    return args


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    for further in STOP_SIGNALS:
        signal.signal(further, signal.SIG_IGN)  # the cleaning up must not be interrupted
    raise DrillError(f"stopped by signal {signal.Signals(signum).name}")


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    for signum in STOP_SIGNALS:
        signal.signal(signum, _stop)
    try:
        run_drill(args.command, args.iteration, args.log_dir, args.trace_dir, args.time_limit)
    except (DrillError, OSError) as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
