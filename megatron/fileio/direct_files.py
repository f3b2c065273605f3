"""Files that are written and read around the page cache (O_DIRECT), and the aligned memory that this asks for.

Transfers must begin at multiples of ALIGNMENT in file and memory and be multiples of it long (open(2), O_DIRECT).
Where a file system refuses, `auto` falls back to buffered I/O and says so once per process and directory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from pathlib import Path

import numpy as np

from megatron.fileio.files import open_file
from restart_trace.under_way import STORAGE, UnderWay

logger = logging.getLogger(__name__)

ALIGNMENT = 4096
_HUGE_PAGE = 2 << 20
_FALLOC_FL_KEEP_SIZE = 1  # linux/falloc.h
_told: set[Path] = set()


class DirectIOError(OSError):
    """--direct-io on, and the file system refuses it."""


def align_up(size: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def aligned_memory(size: int) -> memoryview:
    """`size` bytes of anonymous memory at an aligned address, in huge pages where the kernel has them.

    A huge page is one page fault instead of 512, and one piece for a direct transfer. It is given back when the last
    view of it is gone.
    """
    length = max(align_up(size), ALIGNMENT)
    room = _HUGE_PAGE if length >= _HUGE_PAGE else 0  # what lies before its boundary is in small ones
    memory = mmap.mmap(-1, length + room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = -np.frombuffer(memory, dtype=np.uint8).ctypes.data % _HUGE_PAGE if room else 0
    return memoryview(memory)[start : start + size]


def open_direct(path: Path, flags: int, mode: str) -> tuple[int, bool]:
    """Open `path` with `flags`; (descriptor, whether it is direct). `mode` is auto, on or off.

    Raises DirectIOError for mode `on` where the file system refuses O_DIRECT, and OSError as os.open does.
    """
    flags |= os.O_CLOEXEC
    if mode == "off" or not hasattr(os, "O_DIRECT"):
        return open_file(path, flags), False
    try:
        return open_file(path, flags | os.O_DIRECT), True
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    # A file that O_EXCL | O_CREAT made before the file system refused O_DIRECT is still there.
    fd = open_file(path, flags & ~os.O_EXCL)
    try:
        refuse_direct(path, mode)
    except DirectIOError:
        os.close(fd)
        raise
    return fd, False


def refuse_direct(path: Path, mode: str) -> None:
    """The file system of `path` does not take direct transfers: say so once, or raise DirectIOError."""
    if mode == "on":
        fix = "use --direct-io auto or off, or another directory"
        raise DirectIOError(errno.EINVAL, f"the file system refuses O_DIRECT: {fix}", str(path))
    root = path.parent.parent
    if root not in _told:
        _told.add(root)
        logger.warning("%s: the file system refuses O_DIRECT; --direct-io auto: buffered I/O instead", root)


def make_buffered(fd: int) -> None:
    """Take O_DIRECT off an open descriptor."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def allocate(fd: int, num_bytes: int, *, start: int = 0, keep_size: bool = False) -> None:
    """Reserve the space of an open file from `start` on; it gets at least the size that ends there, unless `keep_size`.

    Direct writes into reserved space go on side by side; ext4 takes those that extend a file, or fill its holes, one
    after the other. A file system that reserves nothing (fallocate(2)) leaves the file as it is: servers answer that
    in several ways. Raises OSError for what a write would raise, too.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # os.posix_fallocate would write to every block there
    mode = _FALLOC_FL_KEEP_SIZE if keep_size else 0
    number = errno.EINTR if num_bytes else 0
    with UnderWay(STORAGE, "allocation of", fd):
        while number == errno.EINTR:
            failed = libc.fallocate64(fd, mode, ctypes.c_int64(start), ctypes.c_int64(num_bytes))
            number = ctypes.get_errno() if failed else 0
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        raise OSError(number, os.strerror(number))


def write_all(fd: int, view: memoryview, offset: int) -> None:
    """Write `view` at `offset`, however many calls that takes."""
    while view:
        with UnderWay(STORAGE, "write to", fd):
            written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_all(fd: int, view: memoryview, offset: int) -> int:
    """Read into `view` from `offset` until it is full or the file ends; returns the bytes read."""
    total = 0
    while total < len(view):
        with UnderWay(STORAGE, "read of", fd):
            count = os.preadv(fd, [view[total:]], offset + total)
        total += count
        if count == 0 or count % ALIGNMENT:  # the end of the file: a direct read after it would be misaligned
            break
    return total
