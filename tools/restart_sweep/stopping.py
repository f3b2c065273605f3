"""Signals that end a sweep: as an error does, so that nothing of the cell under way is left running."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(Exception):
    """A signal asked the sweep to end; the message is its name."""


def stop_on_signals() -> None:
    """From here on these signals raise Stopped."""
    for signum in _STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # what is to be ignored (nohup) stays so
            signal.signal(signum, _stop)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    for further in _STOP_SIGNALS:
        signal.signal(further, signal.SIG_IGN)  # what ends the cell's processes must not be interrupted
    raise Stopped(signal.Signals(signum).name)
