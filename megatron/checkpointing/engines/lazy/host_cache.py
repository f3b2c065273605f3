"""The host memory through which engine `lazy` saves: a bounded pool of aligned buffers, each as large as one block, or
as the largest save so far if that is smaller.

On CUDA they are allocated and pinned while the process starts, in a few large pieces; on the CPU when they are first
needed. They are kept for the next save, so their pages are faulted in only once. Their number never exceeds the limit;
a thread that needs more waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.config.errors import ConfigError
from megatron.fileio.device_copies import Copies, CopyStream
from megatron.fileio.direct_files import ALIGNMENT, align_up
from megatron.fileio.host_buffers import Buffer, cut, new_buffer
from megatron.fileio.host_memory import available_memory, memory_limit
from megatron.fileio.pinned_memory import PIECE, PinnedAhead, PinningError, Pins, why_pinning_failed
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

DEFAULT_IO_THREADS = 4
STREAMING_THREADS = 8  # each has one request in flight, and mostly waits


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a tensor, at `offset` within a block and its buffer."""

    tensor: str
    start: int
    stop: int
    offset: int


def gather(
    buffer: Buffer, sources: Mapping[str, torch.Tensor], pieces: Iterable[Piece], stream: CopyStream | None = None
) -> Copies | None:
    """Copy the pieces into `buffer`. `sources`: name -> bytes, a uint8 tensor.

    With a stream the copies are queued on it and returned; without one they are done on return.
    """
    if stream is None:
        for piece, stop in _with_ends(pieces):
            np.copyto(buffer.array[piece.offset : stop], sources[piece.tensor].numpy()[piece.start : piece.stop])
        return None
    begin = stream.event()
    with stream.queueing():
        for piece, stop in _with_ends(pieces):
            source = sources[piece.tensor][piece.start : piece.stop]
            buffer.tensor[piece.offset : stop].copy_(source, non_blocking=True)
    return stream.copied_since(begin)


def _with_ends(pieces: Iterable[Piece]) -> Iterable[tuple[Piece, int]]:
    """Each piece with its end in the buffer."""
    return ((piece, piece.offset + piece.stop - piece.start) for piece in pieces)


class HostCache:
    """The buffers of one engine.

    `io_threads` of them are reserved for the I/O threads, which therefore never wait for each other's.
    """

    def __init__(self, block_bytes: int, io_threads: int, limit_bytes: int | None, local_world_size: int) -> None:
        """Raises ConfigError if `limit_bytes` is too small."""
        self.block_bytes = block_bytes
        self.io_threads = io_threads
        self._limit_bytes = limit_bytes
        self._local_world_size = local_world_size
        self._limit = io_threads + 1  # number of buffers
        self._buffer_bytes = block_bytes  # size of the buffers that `_take` allocates
        self._free: list[Buffer] = []
        self._made = 0
        self._ahead = 0  # buffers taken by `take_ahead`
        self._pinned_ahead: PinnedAhead | None = None
        self._pinned_bytes = 0  # wanted by pin_ahead
        self._refused: ConfigError | None = None
        self._abandoned: list[Buffer] = []
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
        """Set the limit for a save of `save_bytes`: as given by the flag, or its size as far as memory is free.

        A small save gets small buffers, since the kernel zeroes a complete huge page even if little is copied into it.
        No buffer may be in use.
        """
        if self._pinned_ahead is not None:
            return
        self._limit = self._blocks_for(save_bytes, available_memory())
        buffer_bytes = min(self.block_bytes, align_up(max(save_bytes, 1)))
        if not self._made or buffer_bytes > self._buffer_bytes:
            self.clear()
            self._buffer_bytes = buffer_bytes

    def pin_ahead(self, save_bytes: int, available: int, pins: Pins, op: Operation) -> None:
        """Begin to pin all buffers for saves of `save_bytes` in the background; they are the limit of all later saves.

        `available`: bytes of host memory that were free before any rank of the host pinned some. Nothing is pinned if
        the host has not enough memory for all its ranks; `wait_until_pinned` then raises.
        """
        self._limit = self._blocks_for(save_bytes, available)
        self._pinned_bytes = self._limit * self.block_bytes
        most, of_what = memory_limit()
        needed = self._pinned_bytes * self._local_world_size
        if needed > most:
            self._refused = ConfigError(
                f"{self._flag()}: {self._local_world_size} ranks of this host would pin {needed / 2**30:.1f} GiB, and "
                f"{of_what} is {most / 2**30:.1f} GiB; lower the flag, or run fewer ranks on a host"
            )
            return
        piece = max(PIECE // self.block_bytes, 1) * self.block_bytes  # no block crosses two pieces
        self._pinned_ahead = PinnedAhead(self._pinned_bytes, pins, self._add, op, piece_bytes=piece, ended=self.wake)

    def wait_until_pinned(self) -> None:
        """Wait for the buffers of `pin_ahead`. Raises ConfigError saying why there are none."""
        if self._pinned_ahead is not None:
            with contextlib.suppress(PinningError):  # raised by `is_pinned`, with the flag
                self._pinned_ahead.wait()
        self.is_pinned()

    def is_pinned(self) -> bool:
        """Whether all buffers of `pin_ahead` are there by now. Raises ConfigError saying why there will be none."""
        if self._refused is not None:
            raise self._refused
        ahead = self._pinned_ahead
        if ahead is None:
            return True
        done = ahead.done  # asked before the error, which is set first
        if isinstance(ahead.error, PinningError):
            why = why_pinning_failed(ahead.error, ahead.pinned_bytes, self._pinned_bytes)
            raise ConfigError(f"{self._flag()}: host memory could not be pinned: {why}; or lower the flag")
        if ahead.error is not None:
            raise ahead.error
        return done

    def _flag(self) -> str:
        given = "not given" if self._limit_bytes is None else f"{self._limit_bytes / 2**30:g}"
        return f"--host-cache-size {given} (GiB; the cache is {self._pinned_bytes / 2**30:.2f})"

    def _blocks_for(self, save_bytes: int, available: int) -> int:
        limit = self._limit_bytes
        if limit is None:
            complete = save_bytes + (self.io_threads + 1) * self.block_bytes
            limit = min(complete, available // 2 // self._local_world_size)
        return max(limit // self.block_bytes, self.io_threads + 1)

    def _add(self, memory: np.ndarray[Any, Any]) -> None:
        """Add buffers in memory that was pinned ahead."""
        buffers = cut(memory, self.block_bytes)
        with self._condition:
            self._free += buffers
            self._made += len(buffers)
            self._condition.notify_all()

    def take_io(self, pins: Pins | None) -> Buffer:
        """A buffer for an I/O thread, which holds at most one of these at a time; pinned if there are `pins`."""
        return self._take(pins)

    def take_ahead(self, pins: Pins | None, given_up: Callable[[], bool]) -> Buffer | None:
        """A buffer to gather a block into in advance; waits while the cache is full, or its buffers are not pinned yet.

        None once `given_up()` is true. Raises ConfigError if there are no buffers because they could not be pinned.
        """
        with self._condition:
            self._condition.wait_for(lambda: given_up() or self._ahead < self._limit - self.io_threads)
            self._wait_for_pinned(given_up)
            if given_up():
                return None
            self._ahead += 1
        return self._take(pins)

    def _wait_for_pinned(self, given_up: Callable[[], bool]) -> None:
        """While buffers are pinned ahead: wait for a free one. The caller holds the condition."""
        ahead = self._pinned_ahead
        if ahead is None or self._free:
            return
        if not ahead.done:
            began = now_ns()
            self._condition.wait_for(lambda: self._free or ahead.done or given_up())
            ahead.waited_since(began)
        if not self._free:
            self.is_pinned()

    def _take(self, pins: Pins | None) -> Buffer:
        with self._condition:
            if self._free:
                return self._free.pop()
            self._made += 1
        return new_buffer(self._buffer_bytes, pins)

    def give_back(self, buffer: Buffer, ahead: bool) -> None:
        """Return a buffer; `ahead` if it came from `take_ahead`."""
        with self._condition:
            self._free.append(buffer)
            self._ahead -= ahead
            self._condition.notify_all()

    def abandon(self, buffer: Buffer, ahead: bool) -> None:
        """Remove a buffer from the pool, but keep its memory, since the device may still write into it."""
        with self._condition:
            self._abandoned.append(buffer)
            self._made -= 1
            self._ahead -= ahead
            self._condition.notify_all()

    def wake(self) -> None:
        """Let waiting threads check again whether the save has failed."""
        with self._condition:
            self._condition.notify_all()

    @property
    def allocated_bytes(self) -> int:
        """Size of all buffers, used and free."""
        return self._made * self._buffer_bytes

    def clear(self) -> None:
        """Free the unused buffers."""
        if self._pinned_ahead is not None:
            self._pinned_ahead.stop()
            self._pinned_ahead = None
        with self._condition:
            self._made -= len(self._free)
            self._free.clear()
