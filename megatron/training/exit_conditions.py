"""When to stop before --train-iters: --exit-interval, --exit-duration-in-mins, --exit-signal-handler."""

from __future__ import annotations

import signal
import time
from types import FrameType

from megatron.config import Config
from megatron.parallel.control_plane import ControlPlane


class ExitConditions:
    """Decides collectively whether to stop. Each given flag that needs it costs a collective per iteration."""

    def __init__(self, config: Config, control: ControlPlane) -> None:
        self._training = config.training
        self._control = control
        self._signalled = False
        self._started = 0.0

    def start(self) -> None:
        """Call when the loop begins: starts the duration, and catches SIGTERM if a flag asks for it."""
        self._started = time.monotonic()
        if self._training.exit_signal_handler:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signalled = True

    def reason(self, iteration: int) -> str | None:
        """Why to stop after `iteration`, the same on all ranks; None to continue."""
        interval = self._training.exit_interval
        if interval and iteration % interval == 0:
            return f"--exit-interval {interval}"
        if self._training.exit_signal_handler and self._any(self._signalled):
            return "SIGTERM was received (--exit-signal-handler)"
        minutes = self._training.exit_duration_in_mins
        if minutes is not None and self._any(time.monotonic() - self._started > 60 * minutes):
            return f"--exit-duration-in-mins {minutes}"
        return None

    def _any(self, mine: bool) -> bool:
        return bool(self._control.agree("yes" if mine else None))
