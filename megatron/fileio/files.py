"""Functions for files of every kind: errors that name the file, existence, synchronisation, one write."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

from restart_trace.under_way import STORAGE, UnderWay


class DamagedFileError(RuntimeError):
    """A file is shorter than it was, or its bytes are not those that were saved; the message names it."""


def with_name(exc: OSError, path: Path | str) -> OSError:
    """The same error with the name of the file, which the system calls on a descriptor do not give."""
    if exc.errno is None or exc.filename is not None:
        return exc
    return OSError(exc.errno, exc.strerror, str(path))


_NOTHING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def is_there(path: Path | str) -> bool:
    """Whether something has this name; a link counts itself.

    Raises OSError for any other failure, as storage that does not answer (EIO, ESTALE), or that does not let this
    process look (EACCES, which NFS also answers once a Kerberos ticket has expired), tells of no absence;
    os.path.lexists takes it for one.
    """
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno in _NOTHING:
            return False
        raise
    return True


def is_directory(path: Path | str) -> bool:
    """Whether it is a directory, or a link to one. Raises OSError as `is_there`."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        if error.errno in _NOTHING:
            return False
        raise


def sync_file(fd: int) -> None:
    """fsync an open file."""
    with UnderWay(STORAGE, "fsync of", fd):
        os.fsync(fd)


def sync_directory(path: Path) -> None:
    """fsync a directory: the names of the files in it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_file(fd)
    finally:
        os.close(fd)


def open_file(path: Path | str, flags: int) -> int:
    """As os.open, with the mode of a checkpoint's files; where storage hangs, this waits as a write does."""
    with UnderWay(STORAGE, "opening of", str(path)):
        return os.open(path, flags, 0o644)


def write_some(fd: int, data: Any) -> int:
    """One write(2): the bytes that it took."""
    with UnderWay(STORAGE, "write to", fd):
        return os.write(fd, data)
