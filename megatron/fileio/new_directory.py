"""A directory that appears under its name when it is complete: written beside it, then renamed.

Until then it is called .incomplete_NAME_XXXXXXXX, or .incomplete_NAME_OWNER_GENERATION_XXXXXXXX, where OWNER is a word
of 32 hexadecimal digits for which one process of a generation at a time writes, and a higher generation supersedes the
lower ones. What a killed process has left is removed by the next one: for an owner at once, else if nobody holds its
lock, which a file system without locks does not tell.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron.fileio.files import sync_directory

_PREFIX = ".incomplete_"
_OWNER = re.compile("[0-9a-f]{32}")


@contextlib.contextmanager
def new_directory(out: Path, *, owner: str = "", generation: int = 0, replace: bool = False) -> Iterator[Path]:
    """A directory beside `out` to write into, which is renamed to `out` at the end, and removed after an error.

    `replace`: what is called `out` is removed once the new one is complete; otherwise only an empty directory is.
    Raises OSError if the storage refuses, or FileExistsError if there is something in `out`.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out)
    beginning = _beginning(out, owner, generation)
    temporary = Path(tempfile.mkdtemp(prefix=beginning, dir=out.parent))
    lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        sync_directory(temporary)
        if replace and os.path.lexists(out):
            _replace(out, temporary, beginning)
        else:
            os.rename(temporary, out)
        sync_directory(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def remove_unfinished(parent: Path, owner: str, generation: int) -> None:
    """Remove what processes up to `generation` have left in `parent` that wrote for `owner`: none of them is at work.

    If one is after all, of a launch that does not know yet that it was superseded, it fails with nothing written.
    Nothing is removed for an unknown owner. Raises OSError.
    """
    if _OWNER.fullmatch(owner) is None:
        return
    for left in parent.glob(f"{_PREFIX}*_{owner}_*_????????"):
        number = left.name[:-9].rpartition("_")[2]
        if number.isdecimal() and int(number) <= generation:
            with contextlib.suppress(FileNotFoundError):
                _remove(left, left.name[:-8])


def _remove_abandoned(out: Path) -> None:
    """Remove what killed processes without an owner have left for `out`: nobody holds the locks of these."""
    for left in out.parent.glob(f"{_PREFIX}{glob.escape(out.name)}_????????"):
        try:
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(left, _beginning(out))
        except OSError:  # one that is under way, or storage without locks
            continue
        finally:
            os.close(lock)


def _remove(path: Path, beginning: str) -> None:
    """Remove a directory, which first gets another name: if it is being written after all, it is never published."""
    aside = path.with_name(beginning + os.urandom(4).hex())
    os.rename(path, aside)
    _delete(aside)


def _replace(out: Path, temporary: Path, beginning: str) -> None:
    """Give `temporary` the name of `out`, which has another one meanwhile, and is removed last of all."""
    aside = out.with_name(beginning + os.urandom(4).hex())
    os.rename(out, aside)
    try:
        os.rename(temporary, out)
    except OSError:
        if not os.path.lexists(out):
            os.rename(aside, out)
        raise
    _delete(aside)


def _delete(path: Path) -> None:
    """Remove a directory, a file or a link, never what it leads to; what the storage refuses stays."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _beginning(out: Path, owner: str = "", generation: int = 0) -> str:
    return f"{_PREFIX}{out.name}_{owner}_{generation:08d}_" if owner else f"{_PREFIX}{out.name}_"


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
