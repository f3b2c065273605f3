"""Removes what no load can use any more, on all ranks, while training goes on.

Rank 0 decides (`prune`) and at once renames each directory to `.incomplete_removed_*`. The ranks hear of it together
with the commit. A thread of each rank then removes the files whose names are those of its own save (`Removals`); with
the same layout and engine these are all files. Rank 0 removes the others that the manifest records, then the manifest
and the directory. A removal that is killed leaves a directory that no load looks at, and the next launch removes it in
the same way. No two such directories ever have the same name, so a late rank, or one whose launch was superseded,
removes nothing else.

Only what this run has made is removed: the recorded files of a checkpoint that, by its manifest, this run saved under
the name that it has, and unfinished saves of generations that this directory has given out. No link is followed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.checkpointing.engines.errors import SaveDirectorySupersededError
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.commit import changing, set_aside, why_not_own, why_of_others
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.ownership import Ownership
from megatron.checkpointing.store.search import Candidate, Known, Search
from megatron.fileio.files import sync_directory
from megatron.fileio.no_links import files_in, remove_files
from restart_trace.clock import now_ns
from restart_trace.recorder import Operation, untraced_operation

logger = logging.getLogger(__name__)

_AT_MOST_S = 30.0
_OTHERS_S = 2.0  # for which rank 0 leaves the other ranks' files to them, at the end
_FIRST_LOOK_S = 0.001


@dataclass(frozen=True)
class Pruned:
    """What one step of `prune` has come to.

    `to_look_at`: checkpoints that count among those to keep if their files are all there, which no rank of this launch
    has looked at; what is to go depends on it, and nothing was done. Else `set_aside`: the directories that are to be
    removed, `removed`: what they were called, and `problem`: why there are not more. `left_alone`: what looks like
    something to remove and is not this run's, with the reason; each is in it once in a launch.
    """

    to_look_at: list[Candidate] = field(default_factory=list)
    set_aside: list[Path] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    problem: str | None = None
    left_alone: list[str] = field(default_factory=list)

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
    where there are enough newer ones they go, too, unless their manifest cannot be read. Those that are `in_use` stay.

    Only what this run has saved under the name that it has is counted and removed (`why_not_own`), and no link.

    Raises OSError if `save_dir` cannot be listed, and SaveDirectorySupersededError, with nothing done, if another
    launch owns the directory.
    """
    known = known or Known()
    run_id = "" if owner is None else owner.run_id
    with os.scandir(save_dir) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    paths = {save_dir / entry.name for entry in entries}
    known.set_aside = {path: manifest for path, manifest in known.set_aside.items() if path in paths}
    half_removed, to_remove, others = _of_no_use(save_dir, entries, owner, known)
    if keep_last is not None:
        links = {save_dir / entry.name for entry in entries if entry.is_symlink()}
        to_look_at, surplus, not_ours = _surplus(save_dir, keep_last, step, known, {*to_remove, *others}, links, run_id)
        others |= not_ours
        if to_look_at:
            return Pruned(to_look_at=to_look_at, left_alone=_not_told(others, known))
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
    return Pruned(set_aside=list(aside), removed=removed, problem=problem, left_alone=_not_told(others, known))


def remove_unfinished(save_dir: Path, owner: Ownership, known: Known | None = None) -> bool:
    """Remove what `prune` always removes, above all saves that earlier launches did not finish. Whether there were any.

    On rank 0, while no rank saves: a killed save may hold the space of a whole checkpoint. Warns of what cannot be
    removed. What is `known` to be set aside is on its way out, and was told.
    """
    try:
        pruned = prune(save_dir, None, 0, owner, known)
    except (OSError, SaveDirectorySupersededError) as exc:
        logger.warning("unfinished saves were not removed: %s", exc)
        return False
    removals = Removals(rank=0)
    removals.begin(Removal(pruned.set_aside, (), (), {}, untraced_operation()))
    removals.close()
    for name in pruned.removed:
        logger.info("removed %s/%s, which takes the space of saves to come", save_dir, name)
    for what in pruned.left_alone if known is not None else ():  # otherwise the first save tells it
        logger.info("left alone: %s", what)
    return bool(pruned.removed)


def _not_told(others: Mapping[Path, str], known: Known) -> list[str]:
    """What to say of those `others` of which nothing was said yet: path and reason."""
    new = [path for path in others if path not in known.told]
    known.told.update(new)
    return [f"{path} ({others[path]})" for path in new]


def _surplus(
    save_dir: Path, keep_last: int, step: int, known: Known, but: Collection[Path], links: Collection[Path], run_id: str
) -> tuple[list[Candidate], list[Path], dict[Path, str]]:
    """(those to keep that are to be looked at first, those that are not to be kept, others and why they are not ours).

    Those in `but` are none of them.
    """
    listed = [one for one in Search(save_dir, None, known).listed() if one.step <= step and one.has_manifest]
    listed = [one for one in listed if one.directory not in but]
    others = {one.directory: "a link" for one in listed if one.directory in links}
    for one in listed:
        why = why_of_others(one.directory.name, one.tag, one.run_id, run_id)
        if why is not None:
            others.setdefault(one.directory, why)
    ours = [one.directory for one in listed if one.directory not in others]
    to_look_at: list[Candidate] = []
    kept = 0
    for position, directory in enumerate(ours):
        if kept == keep_last:
            return to_look_at, [one for one in ours[position:] if one not in known.in_use], others
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
    return [], [], others  # there are not more than are to be kept


def _of_no_use(
    save_dir: Path, entries: Sequence[os.DirEntry[str]], owner: Ownership | None, known: Known
) -> tuple[list[Path], list[Path], dict[Path, str]]:
    """(directories that are half removed, directories to remove, and what is called like one of them: why it is none).

    To remove are saves of generations that are over, and checkpoints that were moved aside for one that stands now.
    """
    half_removed: list[Path] = []
    to_remove: list[Path] = []
    others: dict[Path, str] = {}
    for entry in entries:
        path, name = save_dir / entry.name, entry.name
        generation = names.generation_of(name)
        if name.startswith(names.REMOVED_PREFIX):
            if path in known.set_aside:
                continue
            found, given = half_removed, names.name_before_removal(name) is not None
        elif generation is not None:
            if owner is None or generation >= owner.generation:
                continue
            found, given = to_remove, True
        elif name.endswith(names.REPLACED_SUFFIX):
            if not (path.with_name(name.removesuffix(names.REPLACED_SUFFIX)) / names.MANIFEST).is_file():
                continue
            found, given = to_remove, why_not_own(path, "" if owner is None else owner.run_id) is None
        else:
            continue
        if entry.is_dir(follow_symlinks=False) and given:
            found.append(path)
        else:
            others[path] = "a link" if entry.is_symlink() else "not made by this run"
    return half_removed, to_remove, others


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
        self._left: list[_Doomed] = []  # on rank 0: directories in which other ranks may still have had files

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

    def close(self, *, after_error: bool = False) -> None:
        """Remove what is left, when the last save is over. The other ranks may be removing their own meanwhile.

        Storage that hangs does not keep the process from ending. With `after_error` a rank may have ended before it has
        removed its own: it is not waited for, since a restart waits for this one, and leaves it to the next launch.
        """
        if self._thread is not None:
            self._thread.join(_AT_MOST_S)
            if self._thread.is_alive():
                logger.warning("old checkpoints are still being removed: what is left is for the next launch to remove")
                return
        if self._left and self._op is not None and not after_error:
            begin = now_ns()
            for doomed in self._left:
                if not _emptied(doomed):
                    doomed.remove_rest()
            _record(self._op, begin)

    def _remove(self, removal: Removal) -> None:
        begin = now_ns()
        # Each rank has waited for its thread before the save that is over now.
        earlier, self._left = self._left, []
        for doomed in earlier:
            doomed.remove_rest()
        for directory in removal.set_aside:
            remove_files(directory, removal.mine)
            if self._rank == 0:
                doomed = _Doomed.of(directory, removal.held.get(directory))
                if doomed is None:
                    continue
                remove_files(directory, [name for name in doomed.files if name not in removal.all_names])
                if not doomed.is_gone():
                    self._left.append(doomed)
        _record(removal.op, begin)


@dataclass
class _Doomed:
    """A directory that was set aside, on rank 0. `files`: what of it may be removed, by their names within it.

    For a checkpoint these are what its manifest records, which is the last to go. An unfinished save has no record:
    `whole`, all in it goes. So does what an earlier version left of a checkpoint: it removed the manifest first.
    `there`: those that the last look has found.
    """

    directory: Path
    files: Collection[str]
    whole: bool
    there: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, directory: Path, recorded: Collection[str] | None) -> _Doomed | None:
        """None, which is logged, if the record of its files cannot be read. `recorded`: it, where it is known."""
        if recorded is not None:
            return cls(directory, recorded, whole=False)
        try:
            try:
                return cls(directory, Manifest.of(directory).files, whole=False)
            except FileNotFoundError:
                return cls(directory, files_in(directory), whole=True)
        except FileNotFoundError:  # a later launch has removed it
            return None
        except (OSError, ValueError) as exc:
            logger.warning("%s: left alone, for it is not known which files are a checkpoint's: %s", directory, exc)
            return None

    def is_gone(self) -> bool:
        """Whether the directory is gone; it goes now if there is nothing more in it to remove, but for the manifest."""
        if self.there and os.path.lexists(self.directory / self.there[-1]):
            return False  # one call, where the other ranks are waited for
        try:
            left = [name for name in files_in(self.directory) if name != names.MANIFEST]
        except FileNotFoundError:
            return True
        except OSError:
            return False
        self.there = [name for name in left if self.whole or name in self.files]
        if self.there:
            return False
        if left:
            return self._give_back(left)
        remove_files(self.directory, [names.MANIFEST])
        try:
            self.directory.rmdir()
        except OSError:  # folders without files
            shutil.rmtree(self.directory, ignore_errors=True)
        return not os.path.lexists(self.directory)

    def remove_rest(self) -> None:
        """Remove what the other ranks have left, as a rule nothing: rank 0 alone would take a call for each file."""
        if not self.is_gone():
            remove_files(self.directory, self.there)
            self.is_gone()

    def _give_back(self, left: Sequence[str]) -> bool:
        """Files that no save has written stay, where they were: the directory gets its name back, if it can."""
        name = names.name_before_removal(self.directory.name) or self.directory.name
        place = self.directory.with_name(name)
        if os.path.lexists(place):  # a checkpoint of the same step
            place = self.directory.with_name(names.kept_directory(name, time.time_ns()))
        try:
            os.rename(self.directory, place)
        except OSError as exc:
            logger.warning("%s: left alone, with files that no save has written: %s", self.directory, exc)
            return False
        remove_files(place, [names.MANIFEST])
        logger.info("left alone: %s, which no save has written", ", ".join(str(place / name) for name in sorted(left)))
        return True


def _record(op: Operation, begin_ns: int) -> None:
    """Record the span of a removal from `begin_ns` until now. The save may have ended: nothing waits for it."""
    op.add("remove", None, begin_ns, now_ns(), blocking=False)


def _emptied(doomed: _Doomed) -> bool:
    """Whether the other ranks have removed their files before long, and the directory is gone then.

    A rank that removed the others' files meanwhile would take a call for each.
    """
    pause, until = _FIRST_LOOK_S, time.monotonic() + _OTHERS_S
    while not (gone := doomed.is_gone()) and time.monotonic() < until:
        time.sleep(pause)
        pause *= 2
    return gone
