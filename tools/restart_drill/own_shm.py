"""A private /dev/shm for a command: shows what that command leaves there, without the files of other processes."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

SHM = Path("/dev/shm")
_OWN = "mount -t tmpfs none /dev/shm"
_LISTED = _OWN + ' && "$@"; code=$?; ls -A /dev/shm >"$0"; exit "$code"'
_ENTERED = "RESTART_DRILL_OWN_SHM"  # set for a program that was started again with a private /dev/shm


def in_own_shm(command: list[str], listing: Path) -> list[str]:
    """`command` with a private /dev/shm, whose files at the end are listed in `listing`.

    Unchanged if this process may not mount.
    """
    return ["unshare", "--mount", "bash", "-c", _LISTED, str(listing), *command] if may_mount() else command


def left_in_shm(listing: Path) -> list[str]:
    """Names of the files that a command left in its private /dev/shm; empty if it had none."""
    return listing.read_text().split() if may_mount() else []


def enter_own_shm() -> bool:
    """Give this program a private /dev/shm. Returns False if it may not mount.

    The process is replaced by one that runs the same command with the private /dev/shm; there this returns True.
    """
    if os.environ.pop(_ENTERED, None) is not None:
        return True
    if not may_mount():
        return False
    os.environ[_ENTERED] = "1"
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execvp("unshare", ["unshare", "--mount", "bash", "-c", f'{_OWN} && exec "$@"', "bash", *command])


@functools.cache
def may_mount() -> bool:
    """Whether this process may have private mounts; if not, /dev/shm is not checked."""
    command = ["unshare", "--mount", *_OWN.split()]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0
