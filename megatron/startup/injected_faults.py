"""Faults that a drill causes within a rank: with --allow-injected-faults, two signals raise errors in its main thread.

    EXCEPTION_SIGNAL     raises InjectedFault
    DEVICE_ERROR_SIGNAL  on a device, makes a kernel fail a device-side assertion, after which the context of the
                         process is unusable; on CPUs, only raises the exception that such a failure ends in

Python runs signal handlers in the main thread between two of its instructions: a rank that is inside a collective
meets the error when that returns. Without the flag nothing is installed.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any, NoReturn

from restart_trace.devices import accelerator_in_use

EXCEPTION_SIGNAL = signal.SIGRTMIN + 1
DEVICE_ERROR_SIGNAL = signal.SIGRTMIN + 2


class InjectedFault(RuntimeError):
    """Raised at the request of the restart drill."""


def allow_injected_faults() -> None:
    """Install the handlers of both signals; must be called in the main thread."""
    signal.signal(EXCEPTION_SIGNAL, _raise)
    signal.signal(DEVICE_ERROR_SIGNAL, _fail_on_device)


def _raise(signum: int, frame: FrameType | None) -> NoReturn:
    raise InjectedFault("an injected exception (--allow-injected-faults)")


def _fail_on_device(signum: int, frame: FrameType | None) -> NoReturn:
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "accelerator") or not hasattr(torch, "zeros"):  # it is not imported that far yet
        raise InjectedFault("an injected device error, before torch was imported: there is no device yet")
    error = getattr(torch, "AcceleratorError", RuntimeError)  # before torch 2.8 a failed kernel ends in the latter
    kind = accelerator_in_use()
    if kind is not None:
        torch.zeros(1, device=kind)[torch.ones(1, dtype=torch.long, device=kind)]  # index out of bounds
        torch.accelerator.synchronize()
    raise error("an injected device error (--allow-injected-faults)")
