"""Reading regular files and nothing else: a FIFO where a file is expected would block for ever, a device may act.

Of the trace and of checkpoints: the checks before the imports read `latest` and manifests, too.
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
    """Something else than a file is where a file is expected. `str()` names it and says what it is."""

    def __init__(self, path: str | os.PathLike[str], mode: int) -> None:
        self.reason = f"is {_KINDS.get(stat.S_IFMT(mode), 'something else')} and no regular file"
        super().__init__(errno.EINVAL, self.reason, os.fspath(path))

    def __str__(self) -> str:
        return f"{self.filename}: {self.reason}"


def check_regular(path: str | os.PathLike[str], found: os.stat_result) -> None:
    """Raises NotRegularFileError if `found`, the status of `path`, is not a regular file's."""
    if not stat.S_ISREG(found.st_mode):
        raise NotRegularFileError(path, found.st_mode)


def open_regular(path: str | os.PathLike[str]) -> int:
    """A descriptor of the file at `path`, open for reading. Never blocks.

    Looked at before, because to open a device can already do something; and after, opened with O_NONBLOCK (which
    means nothing to a regular file), because something else may have taken its place by then.
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
    """All of the file at `path`. Raises ValueError if it has more than `limit` bytes, OSError as `open_regular`."""
    with open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise ValueError(f"{os.fspath(path)}: has {size} bytes, and {limit} are the most")
        return file.read(size)
