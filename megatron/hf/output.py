"""The directory that a conversion writes: it appears under its name when it is complete."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron.fileio.files import sync_directory
from megatron.hf.errors import ConversionError

_PREFIX = ".incomplete_"


@contextlib.contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` to write into, which is renamed to `out` at the end, and removed after an error.

    What killed conversions to `out` have left is removed first. Raises ConversionError if `out` is there and not an
    empty directory, or is the working directory; OSError if the storage refuses.
    """
    if os.path.lexists(out) and not (out.is_dir() and not out.is_symlink() and not any(out.iterdir())):
        raise ConversionError(f"--out {out}: is there already, and nothing is overwritten; give another, or remove it")
    if out.name in ("", "..") or (out.is_dir() and out.samefile(".")):
        raise ConversionError(
            f"--out {out}: a directory is renamed to it, which the one at work cannot be; name a new one"
        )
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    beginning = f"{_PREFIX}{out.absolute().name}_"
    _remove_left(parent, beginning)
    temporary = Path(tempfile.mkdtemp(prefix=beginning, dir=parent))
    lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        sync_directory(temporary)
        os.rename(temporary, out)
        sync_directory(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _remove_left(parent: Path, beginning: str) -> None:
    """Remove the directories of conversions that were killed: nobody holds their locks."""
    for left in parent.glob(f"{glob.escape(beginning)}????????"):
        try:
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except OSError:  # a conversion that is under way
            continue
        finally:
            os.close(lock)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
