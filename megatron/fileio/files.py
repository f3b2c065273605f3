"""What holds for files of every kind: errors that name them, and directories whose entries are durable."""

from __future__ import annotations

import os
from pathlib import Path


class DamagedFileError(RuntimeError):
    """A file is shorter than it was, or its bytes are not those that were saved; the message names it."""


def with_name(exc: OSError, path: Path | str) -> OSError:
    """The same error with the name of the file, which the system calls on a descriptor do not give."""
    if exc.errno is None or exc.filename is not None:
        return exc
    return OSError(exc.errno, exc.strerror, str(path))


def sync_directory(path: Path) -> None:
    """fsync a directory: the names of the files in it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
