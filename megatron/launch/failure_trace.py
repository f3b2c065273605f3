"""What the launcher records of a failure in the trace of the run: `detected`, `stopped`, `relaunched`, on each host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from restart_trace import cycles
from restart_trace.clock import now_ns
from restart_trace.supervisor import SupervisorTrace, open_supervisor_trace

_FLAGS = ("--restart-trace-dir", "--restart_trace_dir")


class FailureTrace:
    """Failure records of one process of the launcher, beside the trace that the ranks write.

    `arguments`: of the training script, which name the directory. Without one, or where nothing can be written, nothing
    is recorded: a trace is not allowed to end a training.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._directory = _directory(arguments)
        self._stack = contextlib.ExitStack()
        self._trace: SupervisorTrace | None = None
        self._cycle: int | None = None  # the one that failed, if it has a trace

    def detected(self, restart: int, detail: str, at_ns: int) -> None:
        """A failure of the ranks that were started with this number of restarts became known at `at_ns`.

        To be called when they are being ended already: it reads the trace directory.
        """
        self._cycle = self._cycle_of(restart)
        self._record("detected", detail, at_ns)

    def stopped(self) -> None:
        """No rank of the launch that failed runs here any more."""
        self._record("stopped", None, now_ns())

    def before_restart(self, restart: int) -> None:
        """Ranks are about to be started with this number of restarts: it is known afterwards which launch they follow.

        A spare has seen nothing of the failure.
        """
        if restart > 0 and self._cycle is None:
            self._cycle = self._cycle_of(restart - 1)

    def relaunched(self, at_ns: int) -> None:
        """New ranks were started here at `at_ns`, and the failure is over."""
        self._record("relaunched", None, at_ns)
        self._cycle = None

    def _record(self, phase: str, detail: str | None, at_ns: int) -> None:
        if self._directory is None or self._cycle is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if self._trace is None:
                self._trace = self._stack.enter_context(open_supervisor_trace(self._directory))
            self._trace.failure(phase, cycle=self._cycle, detail=detail, at_ns=at_ns)

    def _cycle_of(self, restart: int) -> int | None:
        """Number of the launch in the trace; None if no rank of it came so far."""
        if self._directory is None:
            return None
        key = cycles.launch_key(os.environ | {"TORCHELASTIC_RESTART_COUNT": str(restart)})
        with contextlib.suppress(OSError, ValueError):
            newest = cycles.newest_cycle(self._directory)
            if newest is not None and newest[1]["launch_key"] == key:
                return newest[0]
        return None


def _directory(arguments: Sequence[str]) -> Path | None:
    """Value of the last --restart-trace-dir."""
    found = None
    for i, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in _FLAGS:
            found = value if equals else "".join(arguments[i + 1 : i + 2])
    return Path(found) if found else None
