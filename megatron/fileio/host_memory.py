"""What of the host's memory is free, and which parts of a file lie in it: the kernel's word, standard library only."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping: what the kernel and this process's cgroup say."""
    text = Path("/proc/meminfo").read_text()
    available = int(text.split("MemAvailable:")[1].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        return available if limit == "max" else min(available, int(limit) - used)
    except (OSError, ValueError):  # no cgroup v2 here
        return available


def resident_pages(fd: int) -> bytes:
    """A byte for each page of an open file: 1 if it lies in the page cache now (mincore(2)), else 0.

    The kernel says 1 of all pages of a file that neither belongs to this user nor may be written by it.
    """
    size = os.fstat(fd).st_size
    if size == 0:
        return b""
    mapping = mmap.mmap(
        fd, size, access=mmap.ACCESS_COPY
    )  # writable, which ctypes asks for; nothing is written
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
        raise OSError(ctypes.get_errno(), "mincore failed")
    return pages.raw
