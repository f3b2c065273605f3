"""Reads a log file and returns an ImportedRun."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from ..common.errors import CouldNotRunError
from ..model.imported_run import ImportedRun
from .draft import Draft
from .reader import feed

STANDARD_INPUT = "-"
_LONGEST_LINE = 1 << 20  # bytes; no line that is known is longer, and garbage without a newline must not fill memory
_EXPECTED = (
    "give the output of a Megatron-DeepSpeed training (its `save-checkpoint` timers, `CkptTime` or `saving "
    "checkpoint` lines), of a run with FastPersist's show_statistics, or structured logs of torchtitan"
)


def import_log(path: Path, world_size: int | None = None) -> ImportedRun:
    """Read the log at `path`; `world_size` is the number of ranks, if the log does not state it.

    Raises CouldNotRunError if the file cannot be read, is empty or something else, or contradicts itself.
    """
    run = Draft()
    digest = hashlib.sha256()
    try:
        with _open(path) as stream:
            while line := stream.readline(_LONGEST_LINE):
                digest.update(line)
                feed(run, line.decode("utf-8", errors="replace"))
        if run.known_lines == 0:
            empty = digest.digest() == hashlib.sha256().digest()
            raise CouldNotRunError(f"{'is empty' if empty else 'has no line that is known'}: {_EXPECTED}")
        if not (run.saves or run.loads or run.iterations):
            raise CouldNotRunError(f"has no save, no load and no iteration: {_EXPECTED}")
        return run.finish(path.name, digest.hexdigest()[:12], world_size)
    except OSError as exc:
        raise CouldNotRunError(f"{path}: cannot be read: {exc.strerror}") from exc
    except CouldNotRunError as exc:
        raise CouldNotRunError(f"{path}: {exc}") from None


def _open(path: Path) -> BinaryIO:
    """The log: a regular file, or a pipe, which "-" is the standard input of.

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
    raise CouldNotRunError(f"is {kind}: {_EXPECTED}")


def is_pipe(path: Path) -> bool:
    """Whether the log comes through a pipe, which has no directory to write to."""
    return str(path) == STANDARD_INPUT or path.is_fifo()
