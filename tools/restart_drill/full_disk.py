"""A full disk: a file takes all space that is left on the file system of the checkpoints."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from .launch import DrillError

GIB = 1 << 30
_NAME = ".restart_drill_balloon"


def check_disk(checkpoints: Path, trace_dir: Path, limit_bytes: int) -> None:
    """Raises DrillError unless `checkpoints` is on a small file system of its own, without `trace_dir`.

    Both directories must exist. A full disk is full for all users, so a large one must not be filled by accident.
    """
    status = os.statvfs(checkpoints)
    size = status.f_blocks * status.f_frsize
    if os.stat(checkpoints).st_dev == os.stat(trace_dir).st_dev:
        raise DrillError(
            f"--fault disk-full: {checkpoints} is on the same file system as {trace_dir}, where the trace is written, "
            "and would be filled; give --checkpoints DIR on a small one of its own, such as a tmpfs"
        )
    if size > limit_bytes:
        raise DrillError(
            f"--fault disk-full: the file system of {checkpoints} has {size / GIB:.3g} GiB, more than the limit of "
            f"{limit_bytes / GIB:.3g} GiB; give --checkpoints DIR on a smaller one, or raise --disk-limit"
        )


@contextlib.contextmanager
def full_disk(directory: Path) -> Iterator[Callable[[], None]]:
    """Fill the file system of `directory`, and free it when the context ends.

    Yields a function that fills it again, after others have freed space.
    """
    path = directory / _NAME
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def fill() -> None:
        _take_all_space(descriptor)

    try:
        fill()
        yield fill
    finally:
        os.unlink(path)
        os.close(descriptor)


def _take_all_space(descriptor: int) -> None:
    """Allocate until nothing is left, in ever smaller steps, since a step that does not fit allocates nothing."""
    status = os.fstatvfs(descriptor)
    step = status.f_bfree * status.f_frsize
    end = os.fstat(descriptor).st_size
    while step >= status.f_frsize:
        try:
            os.posix_fallocate(descriptor, end, step)
            end += step
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            step //= 2
