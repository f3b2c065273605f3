"""Reads regular files only: opening a FIFO would block for ever, and opening a device may have effects.

Used for the trace and for checkpoints: the checks before the imports also read `latest` and manifests.
"""

from __future__ import annotations

import errno
import os
import stat

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link that leads out of the checkpoint",
}


class NotRegularFileError(OSError):
    """A path that should be a regular file is something else. `str()` names the path and what it is."""

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        self.reason = f"is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file"
        super().__init__(errno.EINVAL, self.reason, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.reason}"


def check_regular(path: str | os.PathLike[str], found: os.stat_result) -> None:
    """Raises NotRegularFileError unless `found`, the status of `path`, is that of a regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise NotRegularFileError(path, found.st_mode)


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor of the file at `path`, open for reading. Never blocks.

    The type is checked before, since opening a device may have effects, and again after, since the path may have been
    replaced in between; the file is opened with O_NONBLOCK, which has no effect on a regular file.
    Raises NotRegularFileError, and OSError as os.open does.
    """
    check_regular(path, os.stat(path))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        check_regular(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """The content of the file at `path`. Raises ValueError if it exceeds `limit` bytes, else as `open_regular`."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise ValueError(f"{os.fspath(path)}: has {size} bytes; the limit is {limit}")
        return file.read(size)
