"""A private /dev/shm for a command of a test, which shows what that command leaves there."""

from __future__ import annotations

from pathlib import Path

from tools.restart_drill.own_shm import MOUNT, may_mount

_LISTED = MOUNT + ' && "$@"; code=$?; ls -A /dev/shm >"$0"; exit "$code"'


def in_own_shm(command: list[str], listing: Path) -> list[str]:
    """`command` with a private /dev/shm, whose files at the end are listed in `listing`.

    Unchanged if this process may not mount.
    """
    return ["unshare", "--mount", "bash", "-c", _LISTED, str(listing), *command] if may_mount() else command


def left_in_shm(listing: Path) -> list[str]:
    """Names of the files that a command left in its private /dev/shm; empty if it had none."""
    return listing.read_text().split() if may_mount() else []
