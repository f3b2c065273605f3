"""Directories on the node's own disk for files in transfer, removed when the processes that use them have ended.

Each process that uses a directory holds a shared lock in it, which the kernel releases however the process ends. A
process that gets the lock exclusively may remove the directory: the last one to leave it, or a later launch after a
kill. The directories may lie in one of the user's (--storage-cache): only those with a name of `new_name` are touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
import uuid
from pathlib import Path

_LOCK = ".lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_GIVEN = re.compile(r"restart_storage_[a-z0-9_]+_[0-9a-f]{32}")
_YOUNG_S = 60.0  # a directory without a lock is being made, or was left so


def default_root() -> Path:
    """Where such directories are: in TMPDIR, one for each user."""
    return Path(tempfile.gettempdir()) / f"restart_storage_{os.getuid()}"


def new_name(purpose: str) -> str:
    """A name that no directory has, for NodeDirectory. `purpose`: lower-case letters, digits and underscores."""
    return f"restart_storage_{purpose}_{uuid.uuid4().hex}"


class NodeDirectory:
    """The directory `name`, of `new_name`, in `root`, made if it is not there. All who give one name share it."""

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / name
        self._fd: int | None = None
        while self._fd is None:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                fd = os.open(self.path / _LOCK, _LOCK_FLAGS | os.O_CREAT, 0o600)
            except FileNotFoundError:  # removed meanwhile
                continue
            fcntl.flock(fd, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.path / _LOCK).st_ino == os.fstat(fd).st_ino:
                    self._fd = fd
                    return
            os.close(fd)

    def leave(self) -> None:
        """Let go of the directory; the last one to do so removes it. Further calls have no effect."""
        fd, self._fd = self._fd, None
        if fd is None:  # its number may be another file's by now
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(self.path)
        except OSError:  # another process is in it
            pass
        finally:
            with contextlib.suppress(OSError):  # it is closed all the same, and nothing was written through it
                os.close(fd)


def remove_abandoned(root: Path) -> None:
    """Remove the directories in `root` that have a name of `new_name` and whose processes have all ended; no link."""
    with contextlib.suppress(FileNotFoundError), os.scandir(root) as entries:
        for entry in list(entries):
            with contextlib.suppress(OSError):
                if _GIVEN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    _remove_if_abandoned(root / entry.name)


def _remove_if_abandoned(path: Path) -> None:
    """Raises OSError if a process is in it."""
    try:
        fd = os.open(path / _LOCK, _LOCK_FLAGS)
    except FileNotFoundError:
        if time.time() - path.stat().st_mtime > _YOUNG_S:
            shutil.rmtree(path)
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    """Rename the directory, so that no process enters it meanwhile, and remove it."""
    doomed = path.with_name(new_name("removed"))
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
