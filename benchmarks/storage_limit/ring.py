"""io_uring through its raw system calls: direct writes and reads that one thread queues.

(io_uring_setup(2), io_uring_enter(2); structures of linux/io_uring.h. x86-64 and arm64 have the same call numbers.)
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from typing import Any

import numpy as np

_SETUP, _ENTER = 425, 426
_OFF_SQ_RING, _OFF_CQ_RING, _OFF_SQES = 0, 0x8000000, 0x10000000
_READ, _WRITE = 22, 23
_GETEVENTS = 1
_PARAMS = struct.Struct("<10I20I")  # entries, flags, ...; then the offsets of both rings
_SQE = struct.Struct("<BBHiQQII Q24x")
_CQE = struct.Struct("<QiI")
_libc = ctypes.CDLL(None, use_errno=True)


class NoRingError(RuntimeError):
    """This kernel has no io_uring, or it is not allowed; the message says which."""


class Ring:
    """A submission and a completion queue of `depth` entries. For one thread."""

    def __init__(self, depth: int) -> None:
        """Raises NoRingError."""
        params = ctypes.create_string_buffer(_PARAMS.size)
        self._fd = _libc.syscall(_SETUP, depth, params)
        if self._fd < 0:
            code = ctypes.get_errno()
            why = "the kernel has none" if code == errno.ENOSYS else "it is not allowed here"
            raise NoRingError(f"io_uring: {why} ({os.strerror(code)}); leave out the ways whose names begin with uring")
        fields = _PARAMS.unpack(params.raw)
        entries, completions = fields[0], fields[1]
        sq, cq = fields[10:20], fields[20:30]
        self._submissions = mmap.mmap(self._fd, sq[6] + 4 * entries, offset=_OFF_SQ_RING)
        self._completions = mmap.mmap(self._fd, cq[5] + _CQE.size * completions, offset=_OFF_CQ_RING)
        self._entries = mmap.mmap(self._fd, 64 * entries, offset=_OFF_SQES)
        self._sq_tail, self._sq_mask, self._sq_array = sq[1], entries - 1, sq[6]
        self._cq_head, self._cq_tail, self._cq_mask, self._cqes = cq[0], cq[1], completions - 1, cq[5]
        self.under_way = 0  # transfers that have not been waited for

    def queue(self, *, write: bool, fd: int, buffer: memoryview, position: int, tag: int) -> None:
        """Begin to move `buffer` to or from `position` of the file. `tag` comes back with the result."""
        tail = _word(self._submissions, self._sq_tail)
        index = tail & self._sq_mask
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        code = _WRITE if write else _READ
        _SQE.pack_into(self._entries, 64 * index, code, 0, 0, fd, position, address, len(buffer), 0, tag)
        struct.pack_into("<I", self._submissions, self._sq_array + 4 * index, index)
        struct.pack_into("<I", self._submissions, self._sq_tail, (tail + 1) & 0xFFFFFFFF)
        self._enter(1, 0)
        self.under_way += 1

    def wait(self) -> list[tuple[int, int]]:
        """The (tag, bytes moved) of what has ended, at least one. Raises OSError if a transfer has failed."""
        while not (done := self._ended()):
            self._enter(0, 1)
        for _, moved in done:
            if moved < 0:
                raise OSError(-moved, os.strerror(-moved))
        return done

    def close(self) -> None:
        """Give the queues back, once nothing is under way: after an error the kernel may still use the buffers."""
        try:
            while self.under_way:
                if not self._ended():
                    self._enter(0, 1)
        finally:
            for memory in (self._submissions, self._completions, self._entries):
                memory.close()
            os.close(self._fd)

    def _ended(self) -> list[tuple[int, int]]:
        """The (tag, bytes moved or negative error number) of what has ended and was not told yet."""
        head, tail = _word(self._completions, self._cq_head), _word(self._completions, self._cq_tail)
        done = []
        while head != tail:
            tag, moved, _ = _CQE.unpack_from(self._completions, self._cqes + _CQE.size * (head & self._cq_mask))
            done.append((tag, moved))
            head = (head + 1) & 0xFFFFFFFF
        struct.pack_into("<I", self._completions, self._cq_head, head)
        self.under_way -= len(done)
        return done

    def _enter(self, submit: int, complete: int) -> None:
        flags: Any = _GETEVENTS if complete else 0
        while _libc.syscall(_ENTER, self._fd, submit, complete, flags, None, 0) < 0:
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))


def _word(memory: mmap.mmap, offset: int) -> int:
    return int(struct.unpack_from("<I", memory, offset)[0])
