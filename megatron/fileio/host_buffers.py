"""Host memory between storage and tensors: aligned for direct I/O, pinned for devices, used again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron.fileio.device_waits import sleeping_event
from megatron.fileio.direct_files import ALIGNMENT, aligned_memory
from megatron.fileio.pinned_memory import Pins, pinned_memory, pins_of


class Buffer:
    """Aligned host memory, as array, as tensor and as view; it is pinned if the array is."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        """`array`: uint8, of one dimension."""
        self.array = array
        self.tensor = torch.from_numpy(array)
        self.view = array.data
        if array.ctypes.data % ALIGNMENT:
            raise RuntimeError(f"a buffer at {array.ctypes.data:#x} is not aligned to {ALIGNMENT}")


def new_buffer(size: int, pins: Pins | None) -> Buffer:
    """A buffer of `size` bytes, pinned by `pins` if there are any."""
    if pins is not None:
        return Buffer(pinned_memory(size, pins))
    return Buffer(np.frombuffer(aligned_memory(size), dtype=np.uint8))


def cut(memory: np.ndarray[Any, Any], size: int) -> list[Buffer]:
    """`memory` as buffers of `size` bytes; what is left over is unused."""
    return [Buffer(memory[start : start + size]) for start in range(0, len(memory) - size + 1, size)]


class StagingBuffers:
    """Pinned buffers of one size for the reading threads of this process: made at its start, lent to one at a time."""

    def __init__(self) -> None:
        self._free: list[Buffer] = []
        self._lock = threading.Lock()

    def add(self, buffers: list[Buffer]) -> None:
        """Lend these, too; or take them back."""
        with self._lock:
            self._free += buffers

    def take(self, size: int, device: torch.device) -> Buffer:
        """A free buffer of `size` bytes, or a new one."""
        with self._lock:
            for index, buffer in enumerate(self._free):
                if len(buffer.array) == size:
                    return self._free.pop(index)
        return new_buffer(size, pins_of(device))


STAGING_BUFFERS = StagingBuffers()


class Staging:
    """The buffers of one reading thread: one; for a device two in turn, one read into while the other's bytes move on.

    They are taken when they are first needed.
    """

    def __init__(self, block_bytes: int, device: torch.device, after: Any = None) -> None:
        """`device`: where the bytes go; copies to a device follow the event `after` there."""
        self._block_bytes = block_bytes
        self._device = device
        self._after = after
        self._buffers: list[Buffer] = []
        self._events: list[Any] = []
        self._stream: Any = None
        self._turn = 0

    def next_buffer(self) -> Buffer:
        """The next buffer, free to be overwritten."""
        if not self._buffers:
            self._take()
        self._turn = (self._turn + 1) % len(self._buffers)
        self._wait(self._turn)
        return self._buffers[self._turn]

    def copy(self, begin: Callable[[], None]) -> None:
        """Have `begin` queue or make copies from the current buffer, which stays as it is until they are done."""
        if self._stream is None:
            begin()
            return
        with torch.get_device_module(self._device).stream(self._stream):
            begin()
        self._events[self._turn] = self._stream.record_event(sleeping_event(self._device))

    def finish(self) -> None:
        """Return when everything has arrived, and give the buffers back."""
        for turn in range(len(self._buffers)):
            self._wait(turn)
        if self._stream is not None:
            STAGING_BUFFERS.add(self._buffers)
        self._buffers = []

    def _take(self) -> None:
        on_device = self._device.type != "cpu"
        if on_device:
            self._buffers = [STAGING_BUFFERS.take(self._block_bytes, self._device) for _ in range(2)]
        else:
            self._buffers = [new_buffer(self._block_bytes, None)]
        self._events = [None] * len(self._buffers)
        if on_device:
            self._stream = torch.get_device_module(self._device).Stream(self._device)
            self._stream.wait_event(self._after)  # the host waits for nothing

    def _wait(self, turn: int) -> None:
        if self._events[turn] is not None:
            self._events[turn].synchronize()
            self._events[turn] = None
