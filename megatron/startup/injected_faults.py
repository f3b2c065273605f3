"""Faults that a drill causes within a rank: with --allow-injected-faults, two signals raise errors in its main thread.

    EXCEPTION_SIGNAL     raises InjectedFault
    DEVICE_ERROR_SIGNAL  on a device, makes a kernel fail a device-side assertion, after which the context of the
                         process is unusable; on CPUs, only raises the exception that such a failure ends in
    HOLD_SIGNAL          has the rank wait in its next return (in_process_restart.py) until the signal comes again, so
                         that a drill has time to harm it there

Python runs signal handlers in the main thread between two of its instructions: a rank that is inside a collective
meets the error when that returns, and one that is inside the trace or a log after that, since those let no error of
their own through. Without the flag nothing is installed.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from megatron.processes.in_process_restart import at_return
from restart_trace.devices import accelerator_in_use

EXCEPTION_SIGNAL = signal.SIGRTMIN + 1
DEVICE_ERROR_SIGNAL = signal.SIGRTMIN + 2
HOLD_SIGNAL = signal.SIGRTMIN + 4  # 3 ends data workers
_KEEP_ERRORS = ("restart_trace", "logging")  # packages that raise nothing in their callers
_AGAIN_S = 0.001
_POLL_S = 0.001


class InjectedFault(RuntimeError):
    """Raised at the request of the restart drill."""


def allow_injected_faults() -> None:
    """Install the handlers of the signals; must be called in the main thread."""
    signal.signal(EXCEPTION_SIGNAL, _outside_what_keeps_errors(_raise))
    signal.signal(DEVICE_ERROR_SIGNAL, _outside_what_keeps_errors(_fail_on_device))
    held = False

    def hold_or_let_go(*_: object) -> None:
        nonlocal held
        held = not held

    def wait() -> None:
        while held:
            time.sleep(_POLL_S)

    signal.signal(HOLD_SIGNAL, hold_or_let_go)
    at_return(wait)


def _outside_what_keeps_errors(fail: Callable[[], NoReturn]) -> Callable[[int, FrameType | None], None]:
    """A handler that calls `fail`; if it comes within a package of _KEEP_ERRORS, it has the signal sent again."""

    def handle(signum: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] in _KEEP_ERRORS:
                again = threading.Timer(_AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, signum))
                again.daemon = True
                again.start()
                return
            frame = frame.f_back
        fail()

    return handle


def _raise() -> NoReturn:
    raise InjectedFault("an injected exception (--allow-injected-faults)")


def _fail_on_device() -> NoReturn:
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "accelerator") or not hasattr(torch, "zeros"):  # it is not imported that far yet
        raise InjectedFault("an injected device error, before torch was imported: there is no device yet")
    error = getattr(torch, "AcceleratorError", RuntimeError)  # before torch 2.8 a failed kernel ends in the latter
    kind = accelerator_in_use()
    if kind is not None:
        torch.zeros(1, device=kind)[torch.ones(1, dtype=torch.long, device=kind)]  # index out of bounds
        torch.accelerator.synchronize()
    raise error("an injected device error (--allow-injected-faults)")
