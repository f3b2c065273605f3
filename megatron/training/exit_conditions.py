"""When to stop before --train-iters: --exit-interval, --exit-duration-in-mins, --exit-signal-handler."""

from __future__ import annotations

import os
import signal
from types import FrameType

from megatron.config import Config
from megatron.config.training import EXIT_SIGNALS
from megatron.parallel.control_plane import ControlPlane
from megatron.training.stop_time import StopTime
from restart_trace.clock import now_ns


class ExitConditions:
    """Decides collectively whether to stop. Each given flag that needs it costs a collective per question.

    `begun_ns`: when this start of the process began (monotonic, ns), from which the duration counts.
    """

    def __init__(self, config: Config, control: ControlPlane, begun_ns: int) -> None:
        self._training = config.training
        self._control = control
        self._signalled: str | None = None
        self.stop_time = StopTime(config, os.environ)
        self._begun_ns = begun_ns

    def start(self) -> None:
        """Call when the loop begins: catches the signals that a flag asks for. Before, there is nothing to save."""
        for name in self._training.stops_at:
            signal.signal(signal.Signals[name], self._on_signal)

    def catch_all(self) -> None:
        """Call when all is trained and saved: no signal ends the process any more, but all set `signalled`."""
        for name in (*EXIT_SIGNALS, "SIGHUP"):
            if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN:  # as nohup has it, or after a signal
                signal.signal(signal.Signals[name], self._on_signal)

    @property
    def signalled(self) -> bool:
        """Whether a signal that asks for the end has reached this rank; others may not have got it."""
        return self._signalled is not None

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = signal.Signals(signum).name
        _ignore_further_signals()

    def reason(self, iteration: int) -> str | None:
        """Why to stop after `iteration`, the same on all ranks; None to continue."""
        interval = self._training.exit_interval
        if interval and iteration % interval == 0:
            return f"--exit-interval {interval}"
        return self.reason_at_once()

    def reason_at_once(self) -> str | None:
        """Why to stop now, whatever else the iteration has yet to do, as evaluations; the same on all ranks."""
        if self._training.exit_signal_handler:
            received = self._control.agree(self._signalled)
            if received:
                _ignore_further_signals()  # that one may have reached another rank alone
                return f"{received[0][1]} was received (--exit-signal-handler)"
        minutes = self._training.exit_duration_in_mins
        if minutes is not None and self._control.agree("yes" if self._over(minutes) else None):
            return f"--exit-duration-in-mins {minutes}"
        return None

    def _over(self, minutes: float) -> bool:
        return now_ns() - self._begun_ns > 60e9 * minutes


def _ignore_further_signals() -> None:
    """A scheduler or launcher asks more than once, at last by SIGTERM, or by SIGHUP as its terminal or ssh ends: that
    must not end the rank before it has saved."""
    for name in (*EXIT_SIGNALS, "SIGHUP"):
        signal.signal(signal.Signals[name], signal.SIG_IGN)
