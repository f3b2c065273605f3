"""Files that are read in blocks: bypassing the page cache, or from it if the bytes lie there already."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Protocol

from megatron.fileio import direct_files
from megatron.fileio.direct_files import ALIGNMENT
from megatron.fileio.extents import BLOCK, GAP
from megatron.fileio.files import DamagedFileError
from megatron.fileio.page_cache import ResidentPages, populate
from restart_trace.regular import open_regular

_MOSTLY_CACHED = 0.5


class RangedFile(Protocol):
    """What is read in blocks: a file (OpenFile), or an object in a bucket (megatron.fileio.objects.ranges); or the
    original of either (megatron.fileio.compressed_files).

    `alignment`: reads begin and end at multiples of it, but for the end of the file. `block`, `gap`: how it is best
    read (megatron.fileio.extents). `only_mapped`: nothing is read around the page cache.
    """

    @property
    def num_bytes(self) -> int: ...

    @property
    def alignment(self) -> int: ...

    @property
    def block(self) -> int: ...

    @property
    def gap(self) -> int: ...

    @property
    def only_mapped(self) -> bool: ...

    def can_be_mapped(self, start: int, stop: int) -> bool:
        """Whether [start, stop) is to be used in the page cache."""
        ...

    def is_read_directly(self, start: int, stop: int) -> bool:
        """Whether [start, stop) is to be read around the page cache."""
        ...

    def map(self) -> mmap.mmap:
        """The file as memory, where it can be mapped. Writing to it changes a copy, not the file."""
        ...

    def read(self, view: memoryview, position: int) -> int:
        """Fill `view`, or as much of it as the file has, from `position`; returns the bytes read of the storage.

        Raises DamagedFileError if the file ends before it should.
        """
        ...

    def close(self) -> None: ...


class RangedFiles(Protocol):
    """Opens what the files of a checkpoint are in place of files on this node."""

    def __call__(self, path: Path) -> RangedFile: ...


class OpenFile:
    """A file to be read in blocks, as RangedFile. `mode` is that of --direct-io: auto, on or off."""

    alignment = ALIGNMENT
    block = BLOCK
    gap = GAP

    def __init__(self, path: Path, size: int, mode: str) -> None:
        """Raises DamagedFileError if the file does not have `size` bytes."""
        self._path = path
        self.num_bytes = size
        self._mode = mode
        self._buffered = open_regular(path)
        self._direct: int | None = None
        self._resident: ResidentPages | None = None
        try:
            if os.fstat(self._buffered).st_size != size:
                self._ends_at(os.fstat(self._buffered).st_size)
            fd, direct = direct_files.open_direct(path, os.O_RDONLY, mode)
            if not direct:
                os.close(fd)
                return
            self._direct = fd
            if mode == "auto":
                self._resident = ResidentPages(self._buffered)
        except BaseException:
            self.close()
            raise

    @property
    def only_mapped(self) -> bool:
        """Whether nothing is read around the page cache: --direct-io auto where the file system refuses that."""
        return self._mode == "auto" and self._direct is None

    def can_be_mapped(self, start: int, stop: int) -> bool:
        """Whether [start, stop) is to be used in the page cache: most of it lies there, or has to pass through it."""
        return self.only_mapped or (self._resident is not None and self._resident.share(start, stop) > _MOSTLY_CACHED)

    def is_read_directly(self, start: int, stop: int) -> bool:
        """Whether [start, stop) is to be read around the page cache."""
        return self._direct is not None and not self.can_be_mapped(start, stop)

    def is_cached(self, start: int, stop: int) -> bool:
        """Whether [start, stop) lies in the page cache, and may be used there (--direct-io auto)."""
        return self._resident is not None and self._resident.share(start, stop) == 1

    def map(self) -> mmap.mmap:
        """The file as memory: its pages in the page cache themselves. Writing to it changes a copy, not the file."""
        return mmap.mmap(self._buffered, self.num_bytes, access=mmap.ACCESS_COPY)

    def read(self, view: memoryview, position: int) -> int:
        """Fill `view`, or as much of it as the file has, from `position`; returns the bytes read.

        Raises DamagedFileError if the file ends before it should.
        """
        fd = self._buffered
        if self._direct is not None and not self.is_cached(position, position + len(view)):
            fd = self._direct
        count = direct_files.read_all(fd, view, position)
        if count < min(len(view), self.num_bytes - position):
            self._ends_at(position + count)
        return count

    def _ends_at(self, position: int) -> None:
        raise DamagedFileError(f"{self._path}: ends at byte {position}, {self.num_bytes} were saved")

    def close(self) -> None:
        os.close(self._buffered)
        if self._direct is not None:
            os.close(self._direct)


class ReadAhead:
    """Reads files into the page cache for one thread, which goes through them in order.

    The kernel reads ahead per open file: threads that share one make its reads look random.
    """

    def __init__(self) -> None:
        self._mappings: dict[Path, mmap.mmap] = {}

    def read(self, path: Path, start: int, stop: int) -> memoryview:
        """Have the bytes [start, stop) of the file in the page cache; returns them, as they lie there.

        There may be fewer than asked for, where the file ends. Raises OSError if the storage fails.
        """
        if path not in self._mappings:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._mappings[path] = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(fd)
        count = populate(self._mappings[path], start, stop)
        return memoryview(self._mappings[path])[start : start + count]
