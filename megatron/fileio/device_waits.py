"""Waiting for a device with a deadline: torch's own `synchronize` waits for ever if what was queued before hangs.

An event is not asked whether it has happened: torch holds the interpreter's lock during `query`, and the driver may
keep that call waiting for as long as another thread allocates or pins memory, so a thread that asks again and again can
stop the rank. torch releases the lock in `synchronize` (torch/csrc/cuda/Event.cpp), which is
therefore called on a thread of its own, with events that make it sleep instead of spin (cudaEventBlockingSync).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from restart_trace.clock import now_ns
from restart_trace.device_threads import device_thread


class DeviceStalledError(RuntimeError):
    """A device has not done in time what was queued on it."""


class Completion:
    """What a device has to do up to an event. `at_ns`: when that was known to be done (monotonic); 0 until then."""

    def __init__(self) -> None:
        self.at_ns = 0
        self._error: BaseException | None = None
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether the device has done it; False also after an error."""
        return self._ended.is_set() and self._error is None

    def wait(self, seconds: float) -> bool:
        """Whether the device has done it within so many seconds. Raises what the device or the driver reported."""
        ended = self._ended.wait(seconds)
        if self._error is not None:
            raise self._error
        return ended

    def end(self, error: BaseException | None) -> None:
        """Called once: the device has done it (None), or has failed."""
        self._error = error
        self.at_ns = now_ns()
        self._ended.set()


class EventWaiter:
    """A thread that waits for the events of one stream, in the order in which they were recorded.

    One thread for all blocks of a save: to start one costs more than the copy of a small block. It ends after `close`,
    or never if the device hangs, which then keeps nobody else from going on.
    """

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[tuple[Any, Completion] | None] = queue.SimpleQueue()
        device_thread(self._run, name=name).start()

    def watch(self, event: Any) -> Completion:
        """The completion of `event`, which has `synchronize()` and was recorded after all that were given before."""
        completion = Completion()
        self._waiting.put((event, completion))
        return completion

    def close(self) -> None:
        """End the thread after the events given so far."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            event, completion = item
            error: BaseException | None = None
            try:
                event.synchronize()
            except BaseException as exc:  # raised by Completion.wait
                error = exc
            completion.end(error)


def sleeping_event(device: Any, *, timing: bool = False) -> Any:
    """An event of `device`, not recorded yet, whose `synchronize` sleeps where the device can do that.

    torch.Event takes no notice of `blocking` (torch 2.6 to 2.14), so that it is the class of the device's own module.
    `timing`: whether it can tell the time that passed between it and another.
    """
    sleeps = {"blocking": True} if device.type == "cuda" else {}  # torch.xpu.Event has no such argument
    return torch.get_device_module(device).Event(enable_timing=timing, **sleeps)


@dataclass(frozen=True)
class DeviceDeadline:
    """How long rank `rank` waits for its device, seconds; the value of --distributed-timeout-minutes.

    A collective that waits for another rank occupies the device as long as that flag allows, and copies that were
    queued after it wait as long: a shorter deadline would give up saves that come through.
    """

    seconds: float
    rank: int

    def wait_for(self, completion: Completion, phase: str, what: str) -> None:
        """Return when the device has come so far.

        Raises DeviceStalledError, with the rank, `phase` of the trace and `what` is waited for, after the deadline, or
        what the device reported.
        """
        if not completion.wait(self.seconds):
            raise self._stalled(phase, what)

    def wait_in(self, call: Callable[[], object], phase: str, what: str) -> None:
        """Return when `call` has returned, which waits for the device without a deadline of its own.

        Raises what it raises, or DeviceStalledError as `wait_for`; its thread then goes on waiting.
        """
        completion = Completion()

        def run() -> None:
            error: BaseException | None = None
            try:
                call()
            except BaseException as exc:  # raised again by Completion.wait
                error = exc
            completion.end(error)

        device_thread(run, name="device-wait").start()
        self.wait_for(completion, phase, what)

    def _stalled(self, phase: str, what: str) -> DeviceStalledError:
        return DeviceStalledError(
            f"rank {self.rank}, phase {phase}: {what} not done after {self.seconds:g} s "
            f"(--distributed-timeout-minutes {self.seconds / 60:g}): the device hangs, or a collective queued before "
            "waits for another rank; look for that rank before you restart, or raise the flag"
        )
