"""Removing what no load can use any more, over all ranks and outside of the time that a save takes.

Rank 0 decides (`prune`). What is to go is set aside at once: renamed to `.incomplete_removed_*`, and without its
manifest. Only then do the ranks hear of it, together with the commit, and train on while a thread of each removes the
files that are called as those that it saves itself (`Removals`): of the same layout and engine these are all. Rank 0
removes what is left, and the directory. Whoever is killed in the midst of this leaves a directory that no load looks at
and that the next launch removes in the same way. No such directory has a name that another had, so a rank that comes
late, or whose launch was superseded, removes nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.checkpointing import naming as names
from megatron.checkpointing.commit import Candidate, Known, Manifest, Search, changing, set_aside
from megatron.checkpointing.ownership import Ownership
from megatron.fileio.files import sync_directory
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)

_AT_MOST_S = 30.0
_OTHERS_S = 2.0  # for which rank 0 leaves the other ranks' files to them, at the end
_FIRST_LOOK_S = 0.001


@dataclass(frozen=True)
class Pruned:
    """What one step of `prune` has come to.

    `to_look_at`: checkpoints that count among those to keep if their files are all there, which no rank of this launch
    has looked at; what is to go depends on it, and nothing was done. Else `set_aside`: the directories that are to be
    removed, `removed`: what they were called, and `problem`: why there are not more.
    """

    to_look_at: list[Candidate] = field(default_factory=list)
    set_aside: list[Path] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    problem: str | None = None

    @property
    def begun(self) -> list[Path] | None:
        """What the other ranks are to hear: `set_aside`, or None if they have to look at checkpoints first."""
        return None if self.to_look_at else self.set_aside


def prune(
    save_dir: Path,
    keep_last: int | None,
    step: int,
    owner: Ownership | None = None,
    known: Known | None = None,
    fsync: bool = False,
) -> Pruned:
    """Set aside what no load can use any more. The same number of calls whatever number of files a checkpoint has.

    Always: leftovers of removals that were killed, and checkpoints that were moved aside for one that stands now. With
    `owner`: leftovers of saves of earlier generations, which can never be committed. With `keep_last`: all but that
    many of the newest complete checkpoints up to `step`, which was just committed. Newer ones were saved before
    training went back: they are not counted, and go when training has passed them. Damaged ones are not counted either;
    where there are enough newer ones they go, too, unless their manifest cannot be read.

    Raises OSError if `save_dir` cannot be listed, and SaveDirectorySupersededError, with nothing done, if another
    launch owns the directory.
    """
    known = known or Known()
    entries = sorted(save_dir.iterdir())
    known.set_aside = {path: known.set_aside[path] for path in entries if path in known.set_aside}
    half_removed = [p for p in entries if p.name.startswith(names.REMOVED_PREFIX) and p not in known.set_aside]
    to_remove = [p for p in entries if not p.name.startswith(names.REMOVED_PREFIX) and _is_of_no_use(p, owner)]
    if keep_last is not None:
        to_look_at, surplus = _surplus(save_dir, keep_last, step, known, to_remove)
        if to_look_at:
            return Pruned(to_look_at=to_look_at)
        to_remove += surplus
    aside: dict[Path, Manifest | None] = dict.fromkeys(half_removed)
    removed, problem = [path.name for path in half_removed], None
    if to_remove:
        with changing(owner):
            try:
                for path in to_remove:
                    candidate = known.complete.get(path)
                    aside[set_aside(path)] = candidate.manifest if candidate is not None else None
                    removed.append(path.name)
            except OSError as exc:
                problem = str(exc)
        if fsync:  # before any rank removes a file
            with contextlib.suppress(OSError):
                sync_directory(save_dir)
    known.set_aside.update(aside)
    return Pruned(set_aside=list(aside), removed=removed, problem=problem)


def _surplus(
    save_dir: Path, keep_last: int, step: int, known: Known, to_remove: Collection[Path]
) -> tuple[list[Candidate], list[Path]]:
    """(those of the ones to keep that are to be looked at first, directories of those that are not to be kept).

    Those that are `to_remove` anyway are neither.
    """
    listed = [one for one in Search(save_dir, None, known).listed() if one.step <= step]
    ours = [one.directory for one in listed if one.has_manifest and one.directory not in to_remove]
    to_look_at: list[Candidate] = []
    kept = 0
    for position, directory in enumerate(ours):
        if kept == keep_last:
            return to_look_at, ours[position:]
        if directory in known.complete:
            kept += 1
        elif directory not in known.damaged:
            try:
                manifest = Manifest.of(directory)
            except (OSError, ValueError):
                known.damaged.add(directory)
                continue
            to_look_at.append(Candidate(directory, manifest.tag, manifest.step, manifest))
            kept += 1
    return [], []  # there are not more than are to be kept


def _is_of_no_use(path: Path, owner: Ownership | None) -> bool:
    """Whether `path` is a save of a generation that is over, or was moved aside for a checkpoint that stands now."""
    generation = names.generation_of(path.name)
    if generation is not None:
        return owner is not None and generation < owner.generation
    if not path.name.endswith(names.REPLACED_SUFFIX):
        return False
    return (path.with_name(path.name.removesuffix(names.REPLACED_SUFFIX)) / names.MANIFEST).is_file()


@dataclass(frozen=True)
class Removal:
    """What one rank removes after a save: of each directory that was `set_aside`, the files called `mine`.

    On rank 0 `all_names` are what all ranks call their files: it removes what is called otherwise. `held`: the files in
    a directory, where that is known; else it is listed. `op`: the save, in which this is the phase `remove`.
    """

    set_aside: Sequence[Path]
    mine: Sequence[str]
    all_names: Collection[str]
    held: Mapping[Path, Collection[str]]
    op: Operation


class Removals:
    """The removals of one rank, each on a thread that training does not wait for before its next save."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._thread: threading.Thread | None = None
        self._op: Operation | None = None  # of the latest
        self._left: list[Path] = []  # on rank 0: directories in which other ranks may still have had files

    @property
    def under_way(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, removal: Removal) -> None:
        """Begin to remove."""
        self.wait()
        if removal.set_aside or self._left:
            self._op = removal.op
            self._thread = threading.Thread(target=self._remove, args=(removal,), name="ckpt-removal", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Return when nothing is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Remove what is left, when the last save is over. The other ranks may be removing their own meanwhile.

        Storage that hangs does not keep the process from ending.
        """
        if self._thread is not None:
            self._thread.join(_AT_MOST_S)
            if self._thread.is_alive():
                logger.warning("old checkpoints are still being removed: what is left is for the next launch to remove")
                return
        if self._left and self._op is not None:
            begin = now_ns()
            for directory in self._left:
                if not _emptied(directory):
                    shutil.rmtree(directory, ignore_errors=True)
            _record(self._op, begin)

    def _remove(self, removal: Removal) -> None:
        begin = now_ns()
        # Each rank has waited for its thread before the save that is over now.
        earlier, self._left = self._left, []
        for directory in earlier:
            shutil.rmtree(directory, ignore_errors=True)
        for directory in removal.set_aside:
            _unlink(directory, removal.mine)
            if self._rank == 0:
                there = removal.held[directory] if directory in removal.held else _files_in(directory)
                _unlink(directory, [name for name in there if name not in removal.all_names])
                if not _removed(directory):
                    self._left.append(directory)
        _record(removal.op, begin)


def _record(op: Operation, begin_ns: int) -> None:
    """The span of a removal from `begin_ns` until now. The save may be over: nobody waits for it."""
    op.add("remove", None, begin_ns, now_ns(), blocking=False)


def _removed(directory: Path) -> bool:
    """Whether `directory` is gone; it goes now if it is empty."""
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _emptied(directory: Path) -> bool:
    """Whether the other ranks have removed their files from `directory` before long, which is gone then.

    A rank that removed the others' files meanwhile would take a call for each.
    """
    pause, until = _FIRST_LOOK_S, time.monotonic() + _OTHERS_S
    while not (gone := _removed(directory)) and time.monotonic() < until:
        time.sleep(pause)
        pause *= 2
    return gone


def _files_in(directory: Path) -> list[str]:
    """Their names within it: by one listing of each folder, no look at any file."""
    found = []
    for folder, _, files in os.walk(directory):
        relative = os.path.relpath(folder, directory)
        found += [os.path.normpath(os.path.join(relative, name)) for name in files]
    return found


def _unlink(directory: Path, files: Iterable[str]) -> None:
    """Remove files, by their names within `directory`, and the folders in it that are empty then.

    What cannot be removed stays for the next time: it is in nobody's way.
    """
    folders = set()
    for name in files:
        with contextlib.suppress(OSError):
            os.unlink(directory / name)
        folders.update(str(folder) for folder in Path(name).parents if str(folder) != ".")
    for folder in sorted(folders, key=len, reverse=True):
        with contextlib.suppress(OSError):
            os.rmdir(directory / folder)
