"""Host memory between storage and tensors: aligned for direct I/O, pinned for CUDA, used again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.fileio.direct_files import ALIGNMENT, aligned_memory


class Buffer:
    """Aligned host memory of `size` bytes; pinned for CUDA. The same memory as tensor, as array and as view."""

    def __init__(self, size: int, pinned: bool) -> None:
        if pinned:  # which makes it page-aligned
            self.tensor = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            self.tensor = torch.frombuffer(aligned_memory(size), dtype=torch.uint8)
        self.array = self.tensor.numpy()
        self.view = self.array.data
        if self.array.ctypes.data % ALIGNMENT:
            raise RuntimeError(f"a buffer at {self.array.ctypes.data:#x} is not aligned to {ALIGNMENT}")


class Staging:
    """The buffers of one reading thread: one; for CUDA two in turn, one read into while the other's bytes move on.

    They are made when they are first needed.
    """

    def __init__(self, block_bytes: int, device: torch.device) -> None:
        """`device`: where the bytes go."""
        self._block_bytes = block_bytes
        self._device = device
        self._buffers: list[Buffer] = []
        self._events: list[Any] = []
        self._stream: Any = None
        self._turn = 0

    def next_buffer(self) -> Buffer:
        """The next buffer, free to be overwritten."""
        if not self._buffers:
            self._make()
        self._turn = (self._turn + 1) % len(self._buffers)
        self._wait(self._turn)
        return self._buffers[self._turn]

    def copy(self, begin: Callable[[], None]) -> None:
        """Have `begin` queue or make copies from the current buffer, which stays as it is until they are done."""
        if self._stream is None:
            begin()
            return
        with torch.cuda.stream(self._stream):
            begin()
        self._events[self._turn] = self._stream.record_event()

    def finish(self) -> None:
        """Return when everything has arrived."""
        for turn in range(len(self._buffers)):
            self._wait(turn)

    def _make(self) -> None:
        on_cuda = self._device.type == "cuda"
        self._buffers = [Buffer(self._block_bytes, pinned=on_cuda) for _ in range(2 if on_cuda else 1)]
        self._events = [None] * len(self._buffers)
        self._stream = torch.cuda.Stream(self._device) if on_cuda else None

    def _wait(self, turn: int) -> None:
        if self._events[turn] is not None:
            self._events[turn].synchronize()
            self._events[turn] = None
