"""A private /dev/shm for a command: shows what that command leaves there, without the files of other processes."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

_LISTED = 'mount -t tmpfs none /dev/shm && "$@"; code=$?; ls -A /dev/shm >"$0"; exit "$code"'


def in_own_shm(command: list[str], listing: Path) -> list[str]:
    """`command` with a private /dev/shm, whose files at the end are listed in `listing`.

    Unchanged if this process may not mount.
    """
    return ["unshare", "--mount", "bash", "-c", _LISTED, str(listing), *command] if may_mount() else command


def left_in_shm(listing: Path) -> list[str]:
    """Names of the files that a command left in its private /dev/shm; empty if it had none."""
    return listing.read_text().split() if may_mount() else []


@functools.cache
def may_mount() -> bool:
    """Whether this process may have private mounts; if not, /dev/shm is not checked."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0
