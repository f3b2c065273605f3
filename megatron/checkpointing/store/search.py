"""The checkpoints of a directory, in the order in which a load tries them.

To find the newest, only the first and last lines of each manifest are read, whatever its number of files. The complete
manifest is read, and the files are checked, when its checkpoint is the next that a load would try.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.files import describe_damage, wrong_files
from megatron.checkpointing.store.manifest import Heading, Manifest
from megatron.fileio.files import is_directory, is_there
from restart_trace.regular import read_regular

_NO_MANIFEST = float("inf")  # a checkpoint of upstream counts only if `latest` names it, so it is the newest


class _Aged(Protocol):
    @property
    def directory(self) -> Path: ...
    @property
    def tag(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def sequence(self) -> float: ...


_AnyAged = TypeVar("_AnyAged", bound=_Aged)


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be loaded. `manifest` is None for one that upstream or DeepSpeed wrote."""

    directory: Path
    tag: str
    step: int
    manifest: Manifest | None

    @property
    def place(self) -> str:
        """Its location, for messages."""
        return str(self.directory)

    @property
    def sequence(self) -> float:
        return _NO_MANIFEST if self.manifest is None else self.manifest.sequence


@dataclass(frozen=True)
class Listed:
    """A checkpoint of which only the heading of the manifest is known. `sequence`: as in Candidate."""

    directory: Path
    tag: str
    step: int
    sequence: float
    run_id: str = ""

    @property
    def has_manifest(self) -> bool:
        return self.sequence != _NO_MANIFEST


@dataclass
class Known:
    """The known checkpoints of a directory that this launch owns, in which no other process may change anything.

    They are not checked again, since a check takes a system call for each file, at least one per rank.
    """

    complete: dict[Path, Candidate] = field(default_factory=dict)  # committed by this launch, or checked
    damaged: set[Path] = field(default_factory=set)  # checked
    # Set aside by this launch for removal (megatron.checkpointing.store.removal), with its manifest if that is known.
    set_aside: dict[Path, Manifest | None] = field(default_factory=dict)
    sequence: int = 0  # of the last commit of this launch; 0: none yet
    told: set[Path] = field(default_factory=set)  # left alone, which was said
    # Not removed for now, since another process reads them. The training thread changes this while another one prunes.
    in_use: set[Path] = field(default_factory=set)


class Search:
    """The checkpoints of a directory in the order in which a load tries them: newest first.

    `number`: their number; `steps`: theirs, in order; `problems`: problems of others. `unanswered`: the error of
    storage that did not tell of one, which may be the newest; None if there was none. A directory without a manifest
    counts only if `latest` (or `load_tag`) names it: then upstream or DeepSpeed wrote it. A `latest` that names no
    checkpoint is a problem, too.
    Raises OSError if the directory itself cannot be read.
    """

    def __init__(self, load_dir: Path, load_tag: str | None, known: Known | None = None) -> None:
        self.problems: list[str] = []
        self.unanswered: OSError | None = None
        self._known = known or Known()
        self._left: list[Listed] = []
        self._bare: list[Path] = []  # directories of a step without a manifest
        self._newest: Listed | None = None  # the newest that was not rejected
        self._given: Listed | None = None
        if is_directory(load_dir):
            self._list(load_dir, load_tag)
        self.steps = [one.step for one in self.listed()]
        self.number = len(self.steps)

    @property
    def places(self) -> set[tuple[str, float]]:
        """(directory, sequence) of the checkpoints that `next` has not returned yet."""
        return {(str(one.directory), one.sequence) for one in self._left}

    def listed(self) -> list[Listed]:
        """The checkpoints that `next` has not returned yet, newest first."""
        return newest_first(self._left, self._newest)

    def next(self) -> tuple[Candidate | None, list[str]]:
        """The next checkpoint, or its problems. Its files are not checked."""
        self._accept()
        one = self._given = self.listed()[0]
        self._left.remove(one)
        found = self._known.complete.get(one.directory)
        if found is not None or not one.has_manifest:
            return found or Candidate(one.directory, one.tag, one.step, None), []
        try:
            manifest = Manifest.of(one.directory)
        except (OSError, ValueError) as exc:
            return None, self.reject(self._cannot_be_used(one.directory, exc))
        return Candidate(one.directory, manifest.tag, manifest.step, manifest), []

    def reject(self, why: str) -> list[str]:
        """Reject the checkpoint that `next` returned last. Returns `why`, and further problems that follow from it."""
        self._given = None
        return [why, *self._passed_over()]

    def _accept(self) -> None:
        if self._newest is None:
            self._newest = self._given
        self._given = None

    def _list(self, load_dir: Path, load_tag: str | None) -> None:
        # Read before the directories are listed: a job that saves meanwhile publishes a checkpoint before `latest`
        # names it.
        latest, unreadable = _read_latest(load_dir)
        directories, problems = directories_in(load_dir)  # problems: (tag, what is wrong)
        for directory in directories:
            try:
                listed = _listed(directory, self._known)
            except (OSError, ValueError) as exc:
                if is_private(directory.name, exc):
                    continue
                problems.append((directory.name, self._cannot_be_used(directory, exc)))
            else:
                self._left += listed
        with_manifest = {one.directory for one in self._left} | {load_dir / tag for tag, _ in problems}
        tag = load_tag or latest
        if tag is not None and load_dir / tag not in with_manifest:
            try:
                self._left += _foreign(load_dir, tag)
            except OSError as exc:
                problems.append((tag, self._cannot_be_used(load_dir / tag, exc)))
        self._bare = [p for p in directories if p not in with_manifest and names.step_of(p.name) is not None]
        if load_tag is not None:
            self._left = [one for one in self._left if one.tag == load_tag]
            self._bare = [path for path in self._bare if path.name == load_tag]
            problems = [p for p in problems if p[0].removesuffix(names.REPLACED_SUFFIX) == load_tag]
            self.problems = [what for _, what in problems] + self._passed_over()
            return
        bare = list(self._bare)
        passed_over = self._passed_over()
        known = {one.tag for one in self._left} | {tag.removesuffix(names.REPLACED_SUFFIX) for tag, _ in problems}
        known |= {path.name for path in bare if path not in self._bare}
        self.problems = [what for _, what in problems + unreadable] + passed_over
        if latest is not None and latest not in known and _read_latest(load_dir)[0] == latest:
            self.problems.append(names_nothing(load_dir, latest))

    def _cannot_be_used(self, directory: Path, error: Exception) -> str:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            self.unanswered = error
        return _cannot_be_used(directory, error)

    def _passed_over(self) -> list[str]:
        """A problem for each directory without a manifest whose step is newer than all that may be loaded, once each.

        Older ones may be upstream's, which writes no manifest, and do not matter to this load.
        """
        there = [*self._left, *(one for one in (self._newest, self._given) if one is not None)]
        newest = max((one.step for one in there), default=-1)
        over = [path for path in self._bare if (names.step_of(path.name) or 0) > newest]
        over = [path for path in over if not os.path.lexists(path / names.MANIFEST)]
        self._bare = [path for path in self._bare if path not in over]
        return [f"{path / names.MANIFEST} is missing, so {path.name} may be incomplete" for path in over]


def discover(
    load_dir: Path, load_tag: str | None, known: Known | None = None, *, files: bool = True
) -> tuple[list[Candidate], list[str]]:
    """All checkpoints of a Search, newest first, and the problems of others.

    With `files`, only those whose files all exist with the sizes of the manifest; this takes a system call per file.
    Checksums are verified by the load.
    """
    search = Search(load_dir, load_tag, known)
    candidates: list[Candidate] = []
    problems = list(search.problems)
    for _ in range(search.number):
        candidate, wrong = search.next()
        problems += wrong
        if candidate is None:
            continue
        why = None
        if files and candidate.manifest is not None and (known is None or candidate.directory not in known.complete):
            try:
                why = describe_damage(candidate.directory, wrong_files(candidate.directory, candidate.manifest.files))
            except OSError as exc:
                why = _cannot_be_used(candidate.directory, exc)
        if why is None:
            candidates.append(candidate)
        else:
            problems += search.reject(why)
    return candidates, problems


def directories_in(save_dir: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """The directories that may be checkpoints, links to some included; and (tag, what is wrong) of links to none.

    A link that leads nowhere, or in a circle, is no reason to overlook the others. It is told of if it has the name of
    a checkpoint. Raises OSError if `save_dir` cannot be listed.
    """
    found: list[Path] = []
    wrong: list[tuple[str, str]] = []
    with os.scandir(save_dir) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            try:
                if entry.is_dir():
                    found.append(save_dir / entry.name)
                elif entry.is_symlink():
                    os.stat(entry.path)
            except OSError as exc:
                if names.step_of(entry.name) is not None:
                    wrong.append((entry.name, f"{save_dir / entry.name}: cannot be followed: {exc.strerror}"))
    return sorted(found), sorted(wrong)


def is_private(name: str, error: Exception) -> bool:
    """Whether `error` denies access to a directory whose `name` is no checkpoint's, such as lost+found."""
    return isinstance(error, PermissionError) and names.step_of(name) is None


def _listed(directory: Path, known: Known) -> list[Listed]:
    """The checkpoint in `directory`; [] without a manifest. Raises OSError or ValueError if that cannot be read."""
    if directory in known.complete:
        one = known.complete[directory]
        return [Listed(directory, one.tag, one.step, one.sequence, one.manifest.run_id if one.manifest else "")]
    if not is_there(directory / names.MANIFEST):
        return []
    heading = Heading.of(directory)
    if names.step_of(directory.name) is not None and heading.tag != directory.name:
        raise ValueError(
            f"is the manifest of {heading.tag}, not of {directory.name}: restore that, or rename the directory"
        )
    return [Listed(directory, heading.tag, heading.step, heading.sequence, heading.run_id)]


def _foreign(load_dir: Path, tag: str) -> list[Listed]:
    """The checkpoint called `tag`, if upstream or DeepSpeed wrote it. Raises OSError if storage does not tell."""
    if is_there(load_dir / tag / names.MANIFEST) or not is_upstreams(load_dir / tag):
        return []
    return [Listed(load_dir / tag, tag, names.step_of(tag) or 0, _NO_MANIFEST)]


def is_upstreams(directory: Path) -> bool:
    """Whether the directory has the files of upstream or DeepSpeed; those of this program have the same names.

    Raises OSError if storage does not tell.
    """
    return is_directory(directory) and bool(fnmatch.filter(os.listdir(directory), "mp_rank_*_model_states.pt"))


def _cannot_be_used(directory: Path, error: Exception) -> str:
    path = directory / names.MANIFEST
    return f"{path}: cannot be used: " + str(error).removeprefix(f"{path}: ")


def read_latest(directory: Path, pointer: str = names.LATEST) -> str | None:
    """The tag that the file `pointer` in `directory` names; None without such a file. The tag need not be there.

    Raises ValueError naming the file and saying why it names none.
    """
    path = directory / pointer
    try:
        content = read_regular(path, 2 * names.MAX_NAME)
        tag = content.decode().strip()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: names no checkpoint: it is not text") from None
    except (OSError, ValueError) as exc:
        raise ValueError(f"{path}: names no checkpoint: {str(exc).removeprefix(f'{path}: ')}") from None
    wrong = names.wrong_in_name(tag)
    if wrong:
        raise ValueError(f"{path}: names no checkpoint: {ascii(tag)[:80]} {wrong}")
    return tag


def _read_latest(load_dir: Path) -> tuple[str | None, list[tuple[str, str]]]:
    """(tag that `latest` names, what is wrong with `latest`)."""
    try:
        return read_latest(load_dir), []
    except ValueError as exc:
        return None, [("", str(exc))]


def names_nothing(load_dir: Path, latest: str) -> str:
    """The problem of a `latest` that names a tag without a checkpoint."""
    why = "in which there is no checkpoint" if os.path.isdir(load_dir / latest) else "which is not there"
    return f"{load_dir / names.LATEST} names {latest}, {why}"


def newest_first(candidates: Sequence[_AnyAged], newest: _Aged | None = None) -> list[_AnyAged]:
    """Sort checkpoints into the order in which a load tries them: last committed first.

    Steps beyond that of the newest checkpoint were abandoned when training went back to an earlier step (--load-tag),
    so they come after all others. `newest`: the newest checkpoint, if it is not in `candidates`.
    """

    def age(candidate: _Aged) -> tuple[float, int, bool]:
        return -candidate.sequence, -candidate.step, candidate.directory.name != candidate.tag

    ordered = sorted(candidates, key=age)
    if not ordered:
        return []
    step = ordered[0].step if newest is None else newest.step
    return sorted(ordered, key=lambda c: c.step > step)
