"""Reads a log file and returns an ImportedRun."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..common.errors import CouldNotRunError
from ..model.imported_run import ImportedRun
from .draft import Draft
from .formats import LOGS
from .reader import feed
from .source import open_source

_LONGEST_LINE = 1 << 20  # bytes; no line that is known is longer, and garbage without a newline must not fill memory
EXPECTED = f"give {LOGS}"


def import_log(path: Path, world_size: int | None = None) -> ImportedRun:
    """Read the log at `path`; `world_size` is the number of ranks, if the log does not state it.

    Raises CouldNotRunError if the file cannot be read, is empty or something else, or contradicts itself.
    """
    run = Draft()
    digest = hashlib.sha256()
    try:
        with open_source(path, EXPECTED) as stream:
            while line := stream.readline(_LONGEST_LINE):
                digest.update(line)
                feed(run, line.decode("utf-8", errors="replace"))
        if run.known_lines == 0:
            empty = digest.digest() == hashlib.sha256().digest()
            raise CouldNotRunError(f"{'is empty' if empty else 'has no line that is known'}: {EXPECTED}")
        if not (run.saves or run.loads or run.iterations):
            raise CouldNotRunError(f"has no save, no load and no iteration: {EXPECTED}")
        return run.finish(path.name, digest.hexdigest()[:12], world_size)
    except OSError as exc:
        raise CouldNotRunError(f"{path}: cannot be read: {exc.strerror}") from exc
    except CouldNotRunError as exc:
        raise CouldNotRunError(f"{path}: {exc}") from None
