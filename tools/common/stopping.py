"""Signals that end a program as an error does, so that nothing that it has started is left running."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedBySignal(Exception):
    """A signal asked the program to end; the message is its name."""


def stop_on_signals() -> None:
    """From here on these signals raise StoppedBySignal."""
    for signum in _STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # what is to be ignored (nohup) stays so
            signal.signal(signum, _stop)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    for further in _STOP_SIGNALS:
        signal.signal(further, signal.SIG_IGN)  # cleanup must not be interrupted
    raise StoppedBySignal(signal.Signals(signum).name)
