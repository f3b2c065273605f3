"""Copies off a device on a stream of their own, and how long the device took for them.

What the host spends on such a copy is the time to queue it. What the device spends is between two events that it
records on the stream, before and after: cudaEventElapsedTime, with a resolution of about half a microsecond.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from megatron.fileio.device_waits import Completion, EventWaiter, sleeping_event
from megatron.fileio.host_buffers import Buffer
from megatron.fileio.pinned_memory import Pins, pins_of

_BUS_REPEATS = 5


@dataclass(frozen=True)
class Copies:
    """What was queued on a stream between two events."""

    begin: Any  # an event with timing, as `sleeping_event` makes it
    end: Any
    completion: Completion  # of `end`

    def device_ns(self) -> int:
        """How long the device took, once it is done; ns."""
        return round(1e6 * self.begin.elapsed_time(self.end))


class CopyStream:
    """A stream for copies, ordered after all that training has queued by now. For several threads, one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pins: Pins = pins_of(device)  # for the memory that is copied to
        self._of_devices = torch.get_device_module(device)
        self._stream = self._of_devices.Stream(device)
        self._stream.wait_stream(self._of_devices.current_stream(device))
        self._waiter: EventWaiter | None = None

    def event(self) -> Any:
        """An event after what is queued so far."""
        return self._stream.record_event(sleeping_event(self._device, timing=True))

    def queueing(self) -> AbstractContextManager[Any]:
        """Copies of the body are queued on this stream."""
        return self._of_devices.stream(self._stream)

    def copied_since(self, begin: Any) -> Copies:
        """What was queued since `begin`, an event of this stream."""
        if self._waiter is None:
            self._waiter = EventWaiter("copies-done")
        end = self.event()
        return Copies(begin, end, self._waiter.watch(end))

    def close(self) -> None:
        """End the thread that waits for copies; the next copy starts another."""
        if self._waiter is not None:
            self._waiter.close()
            self._waiter = None

    def measure_bus(self, buffer: Buffer) -> dict[str, float]:
        """Bytes per second between `buffer`, which is pinned, and the device: the best of some copies each way.

        Other ranks of the host may measure at the same time, as they may copy at the same time when they save.
        """
        on_device = torch.empty_like(buffer.tensor, device=self._device)
        found = {}
        for name, target, source in (
            ("bus_to_host_bytes_per_s", buffer.tensor, on_device),
            ("bus_to_device_bytes_per_s", on_device, buffer.tensor),
        ):
            times = [self._time_of_copy(target, source) for _ in range(_BUS_REPEATS)]
            found[name] = 1e9 * len(buffer.array) / max(min(times), 1)
        self.close()
        return found

    def _time_of_copy(self, target: torch.Tensor, source: torch.Tensor) -> int:
        begin = self.event()
        with self.queueing():
            target.copy_(source, non_blocking=True)
        copies = self.copied_since(begin)
        copies.completion.wait(threading.TIMEOUT_MAX)
        return copies.device_ns()


def side_stream(tensors: Iterable[torch.Tensor]) -> CopyStream | None:
    """A stream for copies of these tensors to the host; None if all are there."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
    return None if device is None else CopyStream(device)
