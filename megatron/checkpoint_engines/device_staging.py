"""From storage to a device: pinned buffers of one I/O thread, through which blocks go on while others are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.checkpoint_engines.host_cache import Buffer


class DeviceStaging:
    """Two buffers in turn: one is read into while the other's bytes are on their way to the device."""

    def __init__(self, block_bytes: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._buffers = [Buffer(block_bytes, pinned=on_cuda) for _ in range(2)]
        self._events: list[Any] = [None, None]
        self._stream = torch.cuda.Stream(device) if on_cuda else None
        self._turn = 0

    def next_buffer(self, length: int) -> memoryview:
        """The other buffer, free to be overwritten."""
        self._turn ^= 1
        self._wait(self._turn)
        return self._buffers[self._turn].view[:length]

    def copy(self, pieces: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Begin to copy from the current buffer: (destination bytes on the device, offset in the buffer)."""
        self._events[self._turn] = self._buffers[self._turn].scatter(pieces, self._stream)

    def finish(self) -> None:
        """Return when everything has arrived."""
        for turn in range(2):
            self._wait(turn)

    def _wait(self, turn: int) -> None:
        if self._events[turn] is not None:
            self._events[turn].synchronize()
            self._events[turn] = None
