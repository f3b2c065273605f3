"""A directory of temporary files for the launches of a soak alone: it shows what they leave there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def private_tmpdir() -> Iterator[Path]:
    """A TMPDIR for the launch alone, with the same path on all nodes."""
    before = {name: os.environ.get(name) for name in ("TMPDIR", "EXPORT")}
    temporary = Path(tempfile.mkdtemp(prefix="soak-"))
    os.environ |= {"TMPDIR": str(temporary), "EXPORT": f"{before['EXPORT'] or ''} TMPDIR"}
    try:
        yield temporary
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(temporary, ignore_errors=True)  # nodes that share /tmp with this host have removed it
