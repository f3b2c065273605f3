"""Waiting for a device with a deadline: torch's own `synchronize` waits for ever if what was queued before hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FIRST_PAUSE_S = 20e-6  # a block of 8 MiB is copied in a third of a millisecond
_LONGEST_PAUSE_S = 2e-3


class DeviceStalledError(RuntimeError):
    """A device has not done in time what was queued on it."""


@dataclass(frozen=True)
class DeviceDeadline:
    """How long rank `rank` waits for its device, seconds; the value of --distributed-timeout-minutes.

    A collective that waits for another rank occupies the device as long as that flag allows, and copies that were
    queued after it wait as long: a shorter deadline would give up saves that come through.
    """

    seconds: float
    rank: int

    def wait_for(self, event: Any, phase: str, what: str) -> None:
        """Return when `event` (torch.cuda.Event) has happened.

        Raises DeviceStalledError, with the rank, `phase` of the trace and `what` is waited for, after the deadline.
        """
        end, pause = time.monotonic() + self.seconds, _FIRST_PAUSE_S
        while not event.query():
            if time.monotonic() >= end:
                raise self._stalled(phase, what)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def wait_in(self, call: Callable[[], None], phase: str, what: str) -> None:
        """Return when `call` has returned, which waits for the device without a deadline of its own.

        Raises what it raises, or DeviceStalledError as `wait_for`; its thread then goes on waiting.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as exc:  # raised again below
                errors.append(exc)

        thread = threading.Thread(target=run, name="device-wait", daemon=True)
        thread.start()
        thread.join(self.seconds)
        if thread.is_alive():
            raise self._stalled(phase, what)
        if errors:
            raise errors[0]

    def _stalled(self, phase: str, what: str) -> DeviceStalledError:
        return DeviceStalledError(
            f"rank {self.rank}, phase {phase}: {what} not done after {self.seconds:g} s "
            f"(--distributed-timeout-minutes {self.seconds / 60:g}): the device hangs, or a collective queued before "
            "waits for another rank; look for that rank before you restart, or raise the flag"
        )
