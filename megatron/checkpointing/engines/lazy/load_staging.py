"""From storage to live tensors: the buffers of one I/O thread, read into and copied on from, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.checkpointing.engines.lazy.host_cache import Buffer


class Staging:
    """One buffer on the CPU; for CUDA two in turn, pinned: one is read into while the other's bytes are on their way.

    They are made when they are first needed.
    """

    def __init__(self, block_bytes: int, device: torch.device) -> None:
        self._block_bytes = block_bytes
        self._device = device
        self._buffers: list[Buffer] = []
        self._events: list[Any] = []
        self._stream: Any = None
        self._turn = 0

    def next_buffer(self, length: int) -> memoryview:
        """The next buffer, free to be overwritten."""
        if not self._buffers:
            self._make()
        self._turn = (self._turn + 1) % len(self._buffers)
        self._wait(self._turn)
        return self._buffers[self._turn].view[:length]

    def copy(self, pieces: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Begin to copy from the current buffer: (bytes of a live tensor, offset in the buffer)."""
        self._events[self._turn] = self._buffers[self._turn].scatter(pieces, self._stream)

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
