"""A private /dev/shm for this program: shows what its launches leave there, without the files of other processes."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

SHM = Path("/dev/shm")
MOUNT = "mount -t tmpfs none /dev/shm"
_ENTERED = "RESTART_DRILL_OWN_SHM"  # set for a program that was started again with a private /dev/shm


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
    os.execvp("unshare", ["unshare", "--mount", "bash", "-c", f'{MOUNT} && exec "$@"', "bash", *command])


@functools.cache
def may_mount() -> bool:
    """Whether this process may have private mounts; if not, /dev/shm is not checked."""
    command = ["unshare", "--mount", *MOUNT.split()]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0
