"""A stand-in for a CUDA device that copies, where there is none: its tensors are on the CPU.

It copies at once, and its events happen when the test lets them. Everything but the calls of CUDA is the
product's. Its memory is "pinned" by CountingPins, which keeps what it was asked to pin.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from megatron.fileio.device_copies import Copies
from megatron.fileio.device_waits import EventWaiter
from megatron.fileio.host_buffers import Buffer
from megatron.fileio.pinned_memory import PinningError

DEVICE_NS = 250_000  # between two events of the stand-in


class CountingPins:
    """Pins nothing. `limit`: bytes after which it refuses, as the driver does."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.pinned: dict[int, int] = {}  # address -> bytes

    def pin(self, address: int, num_bytes: int) -> None:
        if self.limit is not None and sum(self.pinned.values()) + num_bytes > self.limit:
            raise PinningError("CUDA_ERROR_OUT_OF_MEMORY (2)")
        self.pinned[address] = num_bytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


class HeldPins(CountingPins):
    """Pins `at_once` pieces, the others once `go_on` is set."""

    def __init__(self, at_once: int) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self._at_once = at_once

    def pin(self, address: int, num_bytes: int) -> None:
        if len(self.pinned) >= self._at_once:
            self.go_on.wait()
        super().pin(address, num_bytes)


@dataclass
class StandInStream:
    """Events happen up to number `stops_after`, all if that is None; two are recorded for each block."""

    stops_after: int | None = None
    pins: CountingPins = field(default_factory=CountingPins)
    events: int = 0
    waiter: EventWaiter | None = None

    def event(self) -> StandInEvent:
        self.events += 1
        return StandInEvent(self, self.events)

    def queueing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copied_since(self, begin: StandInEvent) -> Copies:
        if self.waiter is None:
            self.waiter = EventWaiter("copies-done")
        end = self.event()
        return Copies(begin, end, self.waiter.watch(end))

    def close(self) -> None:
        if self.waiter is not None:
            self.waiter.close()

    def measure_bus(self, buffer: Buffer) -> dict[str, float]:
        """As a bus of 25 GB/s."""
        return {"bus_to_host_bytes_per_s": 25e9, "bus_to_device_bytes_per_s": 25e9}

    def on_a_device(self, tensors: object) -> StandInStream:
        """In place of device_copies.side_stream, which returns another stream for each save."""
        self.waiter = None
        return self


@dataclass
class StandInEvent:
    stream: StandInStream
    number: int

    def synchronize(self) -> None:
        """Never returns for an event that does not happen. torch holds the GIL in `query`: there is none."""
        if self.stream.stops_after is not None and self.number > self.stream.stops_after:
            threading.Event().wait()

    def elapsed_time(self, end: StandInEvent) -> float:
        """Milliseconds, as torch.cuda.Event."""
        return (end.number - self.number) * DEVICE_NS / 1e6
