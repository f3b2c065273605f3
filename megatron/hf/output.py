"""The directory that a conversion writes: it appears under its name when it is complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from megatron.fileio.new_directory import new_directory as directory_beside
from megatron.hf.errors import ConversionError


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` to write into, as megatron.fileio.new_directory.

    Raises ConversionError if `out` is there and not an empty directory, or is the working directory; OSError if the
    storage refuses.
    """
    if os.path.lexists(out) and not (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        raise ConversionError(f"--out {out}: is there already, and nothing is overwritten; give another, or remove it")
    if out.name in ("", "..") or (out.is_dir() and out.samefile(".")):
        raise ConversionError(
            f"--out {out}: a directory is renamed to it, which the one at work cannot be; name a new one"
        )
    with directory_beside(out) as directory:
        yield directory
