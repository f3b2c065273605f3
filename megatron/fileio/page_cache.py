"""Which pages of a file lie in the page cache, by mincore(2)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

_POPULATE_READ = 22  # MADV_POPULATE_READ of linux/mman.h, since 5.14; not in Python's mmap
_LOWEST_BIT = bytes(value & 1 for value in range(256))  # mincore leaves the others undefined
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


class ResidentPages:
    """What of an open file is in the page cache at the moment of each call. The descriptor may be closed meanwhile.

    The kernel says that all of a file is there that neither belongs to this user nor may be written by it.
    """

    def __init__(self, fd: int) -> None:
        """Raises OSError if the file cannot be mapped."""
        self._size = os.fstat(fd).st_size
        self._address = 0
        if self._size:
            # By libc, which tells the address. Shared and read-only: no limit of memory counts it.
            address = _libc.mmap(None, self._size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            if address == _MAP_FAILED:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            self._address = address
            weakref.finalize(self, _libc.munmap, address, self._size)

    def missing_bytes(self, start: int, stop: int) -> int:
        """Bytes of the pages that hold [start, stop) and are not there, in whole pages."""
        return self._pages(start, stop).count(0) * mmap.PAGESIZE

    def share(self, start: int, stop: int) -> float:
        """Share of the pages that hold [start, stop) which are there, 0 to 1; 0 beyond the end of the file."""
        pages = self._pages(start, stop)
        return pages.count(1) / len(pages) if pages else 0.0

    def _pages(self, start: int, stop: int) -> bytes:
        """A byte for each page: 1 if it is there, else 0."""
        first, stop = start // mmap.PAGESIZE * mmap.PAGESIZE, min(stop, self._size)
        if first >= stop:
            return b""
        pages = ctypes.create_string_buffer(-(-(stop - first) // mmap.PAGESIZE))
        if _libc.mincore(ctypes.c_void_p(self._address + first), ctypes.c_size_t(stop - first), pages):
            raise OSError(ctypes.get_errno(), "mincore failed")
        return pages.raw.translate(_LOWEST_BIT)


def populate(mapping: mmap.mmap, start: int, stop: int) -> int:
    """Have the pages of [start, stop) read, and found without faults; returns the bytes of the file there.

    Other threads run meanwhile: mmap's own madvise keeps the interpreter lock until storage has answered.
    Raises OSError (EFAULT: the kernel's word for a page that cannot be read) if the storage fails.
    """
    import numpy as np  # which tells the address of read-only memory

    length = min(stop, len(mapping)) - start
    held = np.frombuffer(mapping, dtype=np.uint8)  # the mapping cannot be closed before this is gone
    if _libc.madvise(held.ctypes.data + start, length, _POPULATE_READ):
        number = ctypes.get_errno()
        if number != errno.EINVAL:  # a kernel before 5.14: the pages are read as they are touched
            raise OSError(number, os.strerror(number))
    return length
