"""Checks that the files of a checkpoint are in its directory and have their sizes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron.checkpointing.engines.base import SavedFile
from restart_trace.regular import NotRegularFileError, check_regular, open_regular

Share = tuple[Path, dict[str, SavedFile]]  # the directory of a checkpoint, and those of its files that one rank checks


def wrong_files(directory: Path, files: Mapping[str, SavedFile], *, listed: bool = True) -> list[str]:
    """What of `files`, by their names within it, is not in `directory` as it was saved. Raises OSError.

    `listed`: by a listing of each folder, which pays where `files` are all that are there; else by opening each.
    """
    folders = {"", *(os.path.dirname(name) for name in files)}
    wrong = [
        f"{directory / folder} is a link that leads out of the checkpoint"
        for folder in sorted(folders)
        if leads_out(directory, folder)
    ]
    if wrong:
        return wrong
    listings = sorted(folders) if listed else []
    found = {name: entry for folder in listings for name, entry in _entries_in(directory, folder)}
    for name, file in files.items():
        path = directory / name
        try:
            size = _size_of(directory, name, found.get(name), file.num_bytes)
        except FileNotFoundError:  # a link may lead nowhere
            wrong.append(f"{path} is missing")
        except NotRegularFileError as exc:
            wrong.append(f"{path} {exc.reason}")
        else:
            if size != file.num_bytes:
                wrong.append(f"{path} has {size} bytes, {file.num_bytes} were saved")
    return wrong


def shares(directory: Path, files: Mapping[str, SavedFile], ranks: Iterable[int], world_size: int) -> list[Share]:
    """What each of `ranks` checks of the `files` in `directory`: each file is checked by one rank of `world_size`."""
    names = sorted(files)
    bounds = [(len(names) * rank // world_size, len(names) * (rank + 1) // world_size) for rank in ranks]
    return [(directory, {name: files[name] for name in names[first:end]}) for first, end in bounds]


def wrong_in(share: Share) -> list[str]:
    """What is wrong with those files, including files that cannot be checked."""
    try:
        return wrong_files(*share, listed=False)
    except OSError as exc:
        return [str(exc)]


def wrong_in_share(directory: Path, files: Mapping[str, SavedFile], rank: int, world_size: int) -> list[str]:
    """What is wrong with the share of `rank`, as `shares` and `wrong_in`."""
    return wrong_in(shares(directory, files, [rank], world_size)[0])


def describe_damage(directory: Path, wrong: Sequence[str]) -> str | None:
    """A message on a checkpoint with what is `wrong` with its files; None if nothing is."""
    return f"{directory.name}: " + "; ".join(wrong) if wrong else None


def missing_files(directory: Path, files: Iterable[str]) -> list[str]:
    """Which of `files` are not in `directory`, by one listing of each folder and a look at those that it lacks."""
    names = list(files)
    folders = sorted({os.path.dirname(name) for name in names})
    listed = {name for folder in folders for name, _ in _entries_in(directory, folder)}
    # Network file systems may list a directory as it was a while ago.
    return [name for name in names if name not in listed and not os.path.exists(directory / name)]


def check_sizes(directory: Path, files: Iterable[SavedFile]) -> None:
    """Raise OSError unless each of `files` is in `directory` with its size: a look at each of them."""
    for file in files:
        path = directory / file.name
        size = path.stat().st_size
        if size != file.num_bytes:
            raise OSError(f"{path} has {size} bytes, {file.num_bytes} were saved")


def _entries_in(directory: Path, folder: str) -> list[tuple[str, os.DirEntry[str]]]:
    """(name within `directory`, entry) of what is right in `folder`: one scan rather than a look for each file."""
    try:
        with os.scandir(directory / folder) as entries:
            return [(os.path.join(folder, entry.name), entry) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size_of(directory: Path, name: str, entry: os.DirEntry[str] | None, expected: int) -> int:
    """Bytes of a file. Raises NotRegularFileError, of a link that leads out of the checkpoint as well, or OSError.

    Where the listing does not say what is `expected`, the file is opened: network file systems may list a directory as
    it was a while ago, and ask the server about a file that is opened.
    """
    path = directory / name
    if (entry is None or entry.is_symlink()) and leads_out(directory, name):
        raise NotRegularFileError(path, stat.S_IFLNK)
    if entry is not None:
        status = entry.stat()
        check_regular(path, status)
        if status.st_size == expected:
            return expected
    fd = open_regular(path)
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def leads_out(directory: Path, name: str) -> bool:
    """Whether a link on the way from `directory` to `name` in it leads out of `directory`."""
    parts = [part for part in name.split("/") if part]
    ways = [os.path.join(directory, *parts[: i + 1]) for i in range(len(parts))]
    if not any(os.path.islink(way) for way in ways):
        return False
    return not os.path.realpath(ways[-1]).startswith(os.path.realpath(directory) + os.sep)
