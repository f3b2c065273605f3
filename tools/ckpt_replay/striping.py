"""Striping of files over the targets of a parallel file system, set by a command of that file system."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

from ..common.machine import filesystem_of
from .plan import ReplayError, Striping

# File system -> command for a directory, whose new files and directories inherit it: lfs-setstripe(1), beegfs-ctl.
COMMANDS = {
    "lustre": "lfs setstripe --stripe-count {count} --stripe-size {size} {directory}",
    "beegfs": "beegfs-ctl --setpattern --numtargets={count} --chunksize={size} {directory}",
}
_DEFAULT_PIECE = 1 << 20  # of both file systems


def check_striping(striping: Striping, directory: Path) -> None:
    """Raises ReplayError if no command is known that sets the striping of files below `directory`."""
    words = _words(striping, directory)
    if shutil.which(words[0]) is None:
        raise ReplayError(f"--striping {striping.text}: there is no program {words[0]}; give --stripe-command COMMAND")


def set_striping(striping: Striping, directory: Path) -> None:
    """Set the striping of new files below `directory`. Raises ReplayError with the output of the command."""
    words = _words(striping, directory)
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[-500:] or "it said nothing"
        raise ReplayError(f"--striping {striping.text}: {shlex.join(words)} ended with {done.returncode}: {said}")


def _words(striping: Striping, directory: Path) -> list[str]:
    filesystem = filesystem_of(directory)
    command = COMMANDS.get(filesystem) if striping.command is None else striping.command
    if command is None:
        raise ReplayError(
            f"--striping {striping.text}: {directory} is on {filesystem}, which is not known to stripe files "
            f"({', '.join(COMMANDS)} are); leave it out, or give --stripe-command COMMAND"
        )
    values = {"count": striping.count, "size": striping.piece_bytes or _DEFAULT_PIECE, "directory": directory}
    try:
        words = [word.format(**values) for word in shlex.split(command)]
    except (ValueError, LookupError) as exc:
        raise ReplayError(
            f"--stripe-command {command}: {exc}; only {{count}}, {{size}} and {{directory}} are replaced"
        ) from None
    if not words:
        raise ReplayError("--stripe-command: is empty; give the command that sets the striping of a directory")
    return words
