"""`follow`: sends a run to an OpenTelemetry collector while it goes on. Trainers start it with --otlp."""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import sys
from pathlib import Path

from restart_trace.collector import endpoint_refusal

from ...common.cli import CHECK_FAILED, OK
from ...common.escaping import visible
from ..common.errors import CouldNotRunError
from .common import add_logdir, progress_of, refuse_flags_of_traces

HELP = "send a run to an OpenTelemetry collector while it goes on"
EXAMPLES = """\
  %(prog)s runs/x/trace --otlp http://collector:4318      the newest cycle and those after it, until Ctrl-C
  %(prog)s runs/x/trace --otlp http://collector:4318 --cycles 0-
                                                         all cycles
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    add_logdir(parser)
    help_ = "a collector that takes OTLP over HTTP; its path /v1/traces is added"
    parser.add_argument("--otlp", metavar="ENDPOINT", type=_endpoint, required=True, help=help_)
    help_ = "3: this cycle alone; 3-: it and those after it (default: the newest one and those after it)"
    parser.add_argument("--cycles", metavar="N[-]", type=_cycles, help=help_)
    help_ = "end when this process has ended (default: at SIGINT or SIGTERM)"
    parser.add_argument("--while-pid", metavar="PID", type=_pid, help=help_)


def run(arguments: argparse.Namespace) -> int:
    """Follow the run until it ends. Returns the exit status: CHECK_FAILED if the collector has not got all spans."""
    from ..render.otlp_live import Collector, Follower, follow

    refuse_flags_of_traces(arguments, "a run that goes on")

    def warn(message: str) -> None:
        print(f"ckpt-analysis: {visible(message)}", file=sys.stderr, flush=True)

    collector = Collector(arguments.otlp, warn)
    newest = _newest(arguments.logdir)
    first, last = arguments.cycles or (newest, None)
    follower = Follower(arguments.logdir, collector, first, last, warn)
    whole = follow(follower, _End(arguments.while_pid).wait, arguments.while_pid)
    if arguments.while_pid is None:
        progress_of(arguments).remark(f"{arguments.otlp}: {collector.sent} spans sent, {collector.unsent} not")
    return OK if whole else CHECK_FAILED


class _End:
    """The end of the run: that of a process, or SIGINT or SIGTERM."""

    def __init__(self, pid: int | None) -> None:
        self._poll = select.poll()
        woken, waking = os.pipe()
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # what starts it may have blocked it until now
        self._poll.register(woken, select.POLLIN)
        self._is_over = False
        if pid is not None:
            try:
                self._poll.register(os.pidfd_open(pid), select.POLLIN)
            except ProcessLookupError:
                self._is_over = True
            except OSError as exc:
                raise CouldNotRunError(f"--while-pid {pid}: cannot be watched: {exc.strerror}; leave it out") from exc

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until the end. Returns whether that has come."""
        self._is_over = self._is_over or bool(self._poll.poll(1000 * seconds))
        return self._is_over


def _newest(directory: Path) -> int:
    """Number of the newest cycle of a trace; 0 if there is none yet. Raises LogDirectoryError if there can be none."""
    from ..ingest.discover import IMPORTED_FILE, LogDirectoryError, list_trace

    try:
        listing = list_trace(directory)
    except LogDirectoryError:
        if not directory.is_dir() or (directory / IMPORTED_FILE).is_file():
            raise
        return 0
    return max(file.cycle for file in listing.files if file.cycle is not None)


def _endpoint(text: str) -> str:
    if wrong := endpoint_refusal(text):
        raise argparse.ArgumentTypeError(f"{text!r} {wrong}")
    return text


def _pid(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text}: is no process; give its id")
    return int(text)


def _cycles(text: str) -> tuple[int, int | None]:
    found = re.fullmatch(r"(\d+)(-?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no cycle: write 3, or 3- for it and those after it")
    return int(found[1]), None if found[2] else int(found[1])
