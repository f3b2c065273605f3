"""Opens what `import` reads: a regular file or a pipe."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..common.errors import CouldNotRunError

STANDARD_INPUT = "-"


def open_source(path: Path, expected: str) -> BinaryIO:
    """A regular file, or a pipe, which "-" is the standard input of. `expected`: what to give in its place.

    A named pipe without a writer counts as empty. Raises OSError, and CouldNotRunError without the path.
    """
    if str(path) == STANDARD_INPUT:
        file = os.dup(0)
    else:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode) or stat.S_ISFIFO(mode):
        os.set_blocking(file, True)
        return os.fdopen(file, "rb")
    os.close(file)
    kind = "a directory" if stat.S_ISDIR(mode) else "neither a regular file nor a pipe"
    raise CouldNotRunError(f"is {kind}: {expected}")


def is_pipe(path: Path) -> bool:
    """Whether the path is a pipe, which has no directory to write to."""
    return str(path) == STANDARD_INPUT or path.is_fifo()
