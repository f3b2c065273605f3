"""Makes and removes files and directories without following a link.

A path is resolved anew at every call, and any part of it may be a link to other files. So directories are opened with
O_NOFOLLOW, and their entries are named relative to the descriptors (openat(2), unlinkat(2)), as in shutil.rmtree. Only
the last part of a directory's own path is checked: --save may itself lie behind a link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from restart_trace.under_way import STORAGE, UnderWay

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_directory(path: Path) -> None:
    """Make the directory and those above it, where they are not there yet.

    Raises NotADirectoryError if a link, or anything but a directory, has its name: what is written into `path` would
    go to another directory. Raises OSError if it cannot be made.
    """
    with UnderWay(STORAGE, "making of", str(path)):
        try:
            os.mkdir(path)
        except FileNotFoundError:
            os.makedirs(path, exist_ok=True)
        except FileExistsError:
            pass
        else:
            return
        mode = os.lstat(path).st_mode
    if not stat.S_ISDIR(mode):
        what = "a link, which is not followed" if stat.S_ISLNK(mode) else "not a directory"
        raise NotADirectoryError(errno.ENOTDIR, f"is {what}: remove it, or rename it", str(path))


@contextlib.contextmanager
def opened_directory(path: Path | str, *, within: int | None = None) -> Iterator[int]:
    """A descriptor of the directory, for the `dir_fd` of calls on what it holds; `within`: that of the one above it.

    Raises NotADirectoryError if it is a link, OSError if it cannot be opened.
    """
    fd = os.open(path, _DIRECTORY, dir_fd=within)
    try:
        yield fd
    finally:
        os.close(fd)


def remove_files(directory: Path, names: Iterable[str]) -> None:
    """Remove the files called `names` within `directory`, and the folders of these names that are empty then.

    A link with one of these names goes itself. What cannot be removed, or lies behind a link, stays.
    """
    by_folder: dict[str, list[str]] = {}
    for name in names:
        folder, file = os.path.split(name)
        by_folder.setdefault(folder, []).append(file)
    if not by_folder:
        return
    with contextlib.suppress(OSError), opened_directory(directory) as top:
        for folder, files in by_folder.items():
            with contextlib.suppress(OSError), _opened_folder(top, folder) as fd:
                for file in files:
                    with contextlib.suppress(OSError):
                        os.unlink(file, dir_fd=fd)
        folders = {part for folder in by_folder for part in _with_those_above(folder)}
        for folder in sorted(folders, key=len, reverse=True):
            above, last = os.path.split(folder)
            with contextlib.suppress(OSError), _opened_folder(top, above) as fd:
                os.rmdir(last, dir_fd=fd)


def files_in(directory: Path) -> list[str]:
    """The names, within `directory`, of what is in it and is no directory; links are listed, and not followed.

    A `directory` that is a link has none. What others remove meanwhile may be missing. Raises OSError if the directory,
    or a folder in it, cannot be listed: FileNotFoundError if the directory itself is not there.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    found = []
    # With descriptors, as shutil.rmtree: between its look and its listing nobody can put a link there.
    for folder, directories, files, fd in os.fwalk(directory, onerror=fail):
        relative = os.path.relpath(folder, directory)
        links = [name for name in directories if _is_link(name, fd)]
        found += [os.path.normpath(os.path.join(relative, name)) for name in (*files, *links)]
    return found


@contextlib.contextmanager
def _opened_folder(top: int, folder: str) -> Iterator[int]:
    """A descriptor of `folder` within the directory `top`; no part of it may be a link."""
    with contextlib.ExitStack() as held:
        fd = top
        for part in folder.split("/") if folder else ():
            fd = held.enter_context(opened_directory(part, within=fd))
        yield fd


def _is_link(name: str, within: int) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(name, dir_fd=within).st_mode)
    except FileNotFoundError:
        return False


def _with_those_above(folder: str) -> Iterator[str]:
    while folder:
        yield folder
        folder = os.path.dirname(folder)
