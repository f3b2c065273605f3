"""The host memory through which engine `lazy` saves: a bounded pool of aligned buffers, each as large as one block.

Buffers are made when they are first needed and kept for the next save, so their pages are faulted in (and on CUDA
pinned) once. Their number never passes the limit; whoever would need more waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.config.errors import ConfigError
from megatron.fileio.direct_files import ALIGNMENT
from megatron.fileio.host_buffers import Buffer
from megatron.fileio.host_memory import available_memory

DEFAULT_IO_THREADS = 4


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a tensor, which lie at `offset` within a block, and so in its buffer."""

    tensor: str
    start: int
    stop: int
    offset: int


def gather(buffer: Buffer, sources: Mapping[str, Any], copies: Iterable[Piece], stream: Any = None) -> Any:
    """Copy the pieces into `buffer`. `sources`: name -> bytes, a numpy array or a uint8 tensor on the device.

    Copies from a device are queued on the CUDA stream `stream`; returns an event after the last one, None where
    all is done on return.
    """
    queued = False
    for piece in copies:
        source = sources[piece.tensor][piece.start : piece.stop]
        stop = piece.offset + piece.stop - piece.start
        if isinstance(source, np.ndarray):
            np.copyto(buffer.array[piece.offset : stop], source)
            continue
        with torch.cuda.stream(stream):
            buffer.tensor[piece.offset : stop].copy_(source, non_blocking=True)
        queued = True
    return stream.record_event() if queued else None


class HostCache:
    """The buffers of one engine.

    `io_threads` of them are kept back for the I/O threads, which so never wait for one another's.
    """

    def __init__(self, block_bytes: int, io_threads: int, limit_bytes: int | None, local_world_size: int) -> None:
        """Raises ConfigError if `limit_bytes` is too little to work with."""
        self.block_bytes = block_bytes
        self.io_threads = io_threads
        self._limit_bytes = limit_bytes
        self._local_world_size = local_world_size
        self._limit = io_threads + 1  # buffers
        self._free: list[Buffer] = []
        self._made = 0
        self._ahead = 0  # buffers taken by `take_ahead`
        self._condition = threading.Condition()
        if block_bytes % ALIGNMENT:
            raise ConfigError(f"--io-block-size: {block_bytes} bytes; must be a multiple of {ALIGNMENT}")
        least = (io_threads + 1) * block_bytes
        if limit_bytes is not None and limit_bytes < least:
            raise ConfigError(
                f"--host-cache-size {limit_bytes / 2**30:g} (GiB): too small for --io-threads {io_threads} and "
                f"--io-block-size {block_bytes / 2**20:g} (MiB), which need {least / 2**30:g}; raise it or lower them"
            )

    def prepare(self, save_bytes: int) -> None:
        """Set the limit for a save of `save_bytes`: as asked, or the save's size within what memory is free."""
        limit = self._limit_bytes
        if limit is None:
            whole = save_bytes + (self.io_threads + 1) * self.block_bytes
            limit = min(whole, available_memory() // 2 // self._local_world_size)
        self._limit = max(limit // self.block_bytes, self.io_threads + 1)

    def take_io(self, pinned: bool) -> Buffer:
        """A buffer for an I/O thread, which holds at most one of these at a time."""
        return self._take(pinned)

    def take_ahead(self, pinned: bool, given_up: Callable[[], bool]) -> Buffer | None:
        """A buffer to gather into ahead of writing; waits while the cache is full. None once `given_up()` is true."""
        with self._condition:
            self._condition.wait_for(lambda: given_up() or self._ahead < self._limit - self.io_threads)
            if given_up():
                return None
            self._ahead += 1
        return self._take(pinned)

    def _take(self, pinned: bool) -> Buffer:
        with self._condition:
            if self._free:
                return self._free.pop()
            self._made += 1
        return Buffer(self.block_bytes, pinned)

    def give_back(self, buffer: Buffer, ahead: bool) -> None:
        """Return a buffer; `ahead` if it came from `take_ahead`."""
        with self._condition:
            self._free.append(buffer)
            self._ahead -= ahead
            self._condition.notify_all()

    def abandon(self, ahead: bool) -> None:
        """Make do without a buffer that was taken: the device may still write into it."""
        with self._condition:
            self._made -= 1
            self._ahead -= ahead
            self._condition.notify_all()

    def wake(self) -> None:
        """Let those who wait look again whether the save was given up."""
        with self._condition:
            self._condition.notify_all()

    @property
    def allocated_bytes(self) -> int:
        """Memory held, used or free for the next save."""
        return self._made * self.block_bytes

    def clear(self) -> None:
        """Give the free buffers back to the system."""
        with self._condition:
            self._made -= len(self._free)
            self._free.clear()
