"""The commit protocol on disk, which rank 0 carries out: publish and discover. removal.py removes.

Files are written into `.incomplete_*`; the manifest is written last into that directory, which is then renamed to its
tag; then `latest` is replaced. Every step is synchronised before the next, so at any instant the newest directory with
a manifest is a complete checkpoint. Only the owner of the directory renames (megatron.checkpointing.store.ownership).

To find the newest checkpoint, only the first and last lines of each manifest are read, whatever its number of files.
The complete manifest is read, and the files are checked, when its checkpoint is the next that a load would try.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.files import missing_files, shares_of, wrong_files
from megatron.checkpointing.store.manifest import (
    MANIFEST_VERSION,
    MAX_SEQUENCE,
    Heading,
    content_checksum,
    parse_manifest,
    read_beginning,
    read_heading,
    read_latest,
    read_manifest_text,
)
from megatron.checkpointing.store.ownership import Ownership
from megatron.fileio.files import is_directory, is_there, sync_directory, sync_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredObject:
    """A file as an object in a store: its ETag, and the CRC-32 of its content ("crc32:...")."""

    etag: str
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json. `files` has every file of the checkpoint except the manifest itself.

    `sequence` counts the commits into a directory from 1: by it the newest checkpoint is the last committed one, even
    after training went back to an earlier step with --load-tag. `loaded_from` is the other directory that the run began
    from; "" if it began from its own or from none. `first_start`: the flags that it began with, as
    preflight/first_start.py has them, and `resumed_with` those of the last start that resumed the directory otherwise
    than from its newest checkpoint; "" if there were none. `run_id` is that of the directory that it was saved into
    (see ownership.py); "" if nobody owned that, or an earlier version wrote it. `objects`: for a checkpoint in object
    storage, the object of each file. `training`: optimizer and schedule (training_identity of
    preflight/compatibility.py); {} if an earlier version wrote it.
    megatron.checkpointing.store.manifest says what each key may hold; a new key must be added there.
    """

    tag: str
    step: int
    engine: str
    layout: dict[str, int]
    model: dict[str, Any]
    files: dict[str, SavedFile]
    loaded_from: str = ""
    first_start: str = ""
    resumed_with: str = ""
    sequence: int = 1
    run_id: str = ""
    manifest_version: int = MANIFEST_VERSION
    objects: dict[str, StoredObject] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The content and, under "checksum", the SHA-256 of its canonical JSON."""
        content = asdict(self)
        training = content.pop("training")
        for key in ("objects", "first_start", "resumed_with"):
            if not content[key]:  # programs of before, which did not know it, read all others
                del content[key]
        if training:  # before the files, where `beginning_of` reads it
            files = list(content).index("files")
            entries = list(content.items())
            content = dict([*entries[:files], ("training", training), *entries[files:]])
        return json.dumps(content | {"checksum": content_checksum(content)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Raises ValueError if `text` is not a complete, unaltered manifest with values of the right types."""
        content = parse_manifest(text)
        content["files"] = {
            name: SavedFile(**entry | {"states": tuple(entry.get("states", ()))})
            for name, entry in content["files"].items()
        }
        content["objects"] = {name: StoredObject(**entry) for name, entry in content.get("objects", {}).items()}
        return Manifest(**content)

    @staticmethod
    def of(directory: Path) -> Manifest:
        """The manifest in `directory`. Raises ValueError as `from_json`, and OSError if it cannot be read."""
        return Manifest.from_json(read_manifest_text(directory))

    @staticmethod
    def beginning_of(directory: Path) -> Manifest:
        """The manifest in `directory` without its files, by `read_beginning`; with its files if it begins differently.

        Raises as `of`.
        """
        content = read_beginning(directory)
        return Manifest.of(directory) if content is None else Manifest(**content, files={})


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


def _write_beside(path: Path, text: str, fsync: bool) -> Path:
    """Write the new content of `path` into a temporary file next to it. Returns that file.

    After the rename to `path` a reader, also after a crash, sees either all of it or the old content.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    # A killed save may have left one; and a FIFO or a link must not be written to.
    temporary.unlink(missing_ok=True)
    with temporary.open("x") as file:
        file.write(text)
        file.flush()
        if fsync:
            sync_file(file.fileno())
    return temporary


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


def next_sequence(save_dir: Path, known: Known | None = None) -> int:
    """Sequence number of the next commit into `save_dir`: one more than that of any checkpoint there.

    `latest` is not asked: a user may have set it back. A launch that knows its directory lists it for its first commit
    only; a number that it does not use is left out.
    """
    if known is not None and known.sequence:
        newest = known.sequence
    else:
        listed = Search(save_dir, None, known).listed()
        newest = max((int(one.sequence) for one in listed if one.has_manifest), default=0)
    number = min(1 + newest, MAX_SEQUENCE)
    if known is not None:
        known.sequence = number
    return number


def write_manifest(directory: Path, manifest: Manifest, fsync: bool) -> None:
    """Write the manifest, which makes `directory` a complete checkpoint. Raises ValueError for an invalid manifest."""
    text = manifest.to_json()
    Manifest.from_json(text)
    os.replace(_write_beside(directory / names.MANIFEST, text, fsync), directory / names.MANIFEST)
    if fsync:
        sync_directory(directory)


def publish(
    save_dir: Path,
    temporary: Path,
    tag: str,
    step: int,
    fsync: bool,
    owner: Ownership | None = None,
    manifest: Manifest | None = None,
) -> list[str]:
    """Rename the finished `temporary` directory to its tag and let `latest` name it.

    An older checkpoint of the same tag is moved aside first, and stays loadable until the new one is in place;
    removal.py removes it. Raises OSError, with the older checkpoints unchanged, if the storage
    refuses or a file of the manifest is missing; SaveDirectorySupersededError if another launch owns the directory.
    Errors after the rename are returned, not raised, since the checkpoint is then committed.
    Without `owner` no other launch may write there.

    `manifest`: the one in `temporary`, if each rank has checked the sizes of its own files there. Then this process
    only checks that it sees all of them; otherwise it compares all sizes.
    """
    with changing(owner):
        found = _inspect(temporary) if manifest is None else _missing(temporary, manifest)
        if isinstance(found, str) or (found is None and manifest is None):
            raise FileNotFoundError(f"{temporary} is not complete: {found or f'it has no {names.MANIFEST}'}")
        return _publish(save_dir, temporary, tag, step, fsync, "" if owner is None else owner.run_id)


def _missing(directory: Path, manifest: Manifest) -> str | None:
    return "; ".join(f"{directory / name} is missing" for name in missing_files(directory, manifest.files)) or None


def changing(owner: Ownership | None) -> contextlib.AbstractContextManager[None]:
    """A context in which no other launch can claim the directory, as in Ownership."""
    return contextlib.nullcontext() if owner is None else owner.exclusively()


def _publish(save_dir: Path, temporary: Path, tag: str, step: int, fsync: bool, run_id: str) -> list[str]:
    final = save_dir / tag
    # Files that need space are written before the checkpoint appears: a full disk must not leave it half published.
    pointers = {
        save_dir / name: _write_beside(save_dir / name, text, fsync)
        for name, text in ((names.LATEST, tag), (names.TRACKER, str(step)))
    }
    moved = _make_way(final, run_id) if is_there(final) else None
    try:
        os.rename(temporary, final)
    except OSError:
        if moved is not None and not os.path.lexists(final):
            os.rename(moved, final)
        raise
    return _point_to(save_dir, pointers, fsync)


def _point_to(save_dir: Path, pointers: dict[Path, Path], fsync: bool) -> list[str]:
    """Replace `latest` and the tracker file for a published checkpoint. Returns the errors."""
    wrong = _not_synchronised(save_dir) if fsync else []
    for pointer, written in pointers.items():
        try:
            os.replace(written, pointer)
        except OSError as exc:
            with contextlib.suppress(OSError):
                written.unlink()
            wrong.append(
                f"{pointer} could not be replaced ({exc.strerror}): remove it, since upstream's programs and DeepSpeed "
                "read it; this program can load without it"
            )
    return wrong + [what for what in (_not_synchronised(save_dir) if fsync else []) if what not in wrong]


def _not_synchronised(save_dir: Path) -> list[str]:
    try:
        sync_directory(save_dir)
    except OSError as exc:
        return [f"{save_dir} could not be synchronised ({exc.strerror}): it may not survive a power loss"]
    return []


def _make_way(path: Path, run_id: str) -> Path:
    """Rename what has the name of a checkpoint that is published now; its new path.

    A checkpoint of this run stays loadable, and is removed later; anything else is kept.
    """
    replaced = path.with_name(path.name + names.REPLACED_SUFFIX)
    if why_not_own(path, run_id) is None:
        if is_there(replaced):
            if why_not_own(replaced, run_id) is None:
                set_aside(replaced)
            else:
                _keep(replaced)
        os.rename(path, replaced)
        return replaced
    return _keep(path)


def _keep(path: Path) -> Path:
    kept = path.with_name(names.kept_directory(path.name, time.time_ns()))
    os.rename(path, kept)
    logger.warning("%s is not a checkpoint that this run saved: it made way for one, and is kept as %s", path, kept)
    return kept


def set_aside(path: Path) -> Path:
    """Rename a directory that is to be removed to a name that loads ignore. Returns its path.

    A removal that is killed at any instant therefore leaves nothing that looks like a checkpoint; and of two launches
    only one gets the directory, the one whose rename succeeds. Raises OSError in the other, or if the storage refuses.
    """
    to_remove = path.with_name(names.removed_directory(path.name, time.time_ns()))
    os.rename(path, to_remove)
    return to_remove


def why_not_own(directory: Path, run_id: str) -> str | None:
    """Why `directory` is not a checkpoint that the run `run_id` saved under this name; None if it is one.

    Its manifest records tag and run. One without a run is of an earlier version, and counts by its tag alone.
    """
    if directory.is_symlink():
        return "a link"
    try:
        heading = read_heading(directory)
        if heading is None:
            manifest = Manifest.of(directory)
            heading = Heading(manifest.tag, manifest.step, manifest.sequence, manifest.run_id)
    except (OSError, ValueError):
        return f"without a {names.MANIFEST} that can be read"
    return why_of_others(directory.name, heading.tag, heading.run_id, run_id)


def why_of_others(name: str, tag: str, saved_by: str, run_id: str) -> str | None:
    """As `why_not_own`, of a directory called `name` whose manifest says `tag` and, as the run, `saved_by`."""
    if name.removesuffix(names.REPLACED_SUFFIX) != tag:
        return f"saved as {tag}"
    return None if saved_by in ("", run_id) else "saved by another run"


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
                why = wrong_with(candidate.directory, candidate.manifest)
            except OSError as exc:
                why = _cannot_be_used(candidate.directory, exc)
        if why is None:
            candidates.append(candidate)
        else:
            problems += search.reject(why)
    return candidates, problems


def wrong_with(directory: Path, manifest: Manifest) -> str | None:
    """What is wrong with the files of the checkpoint in `directory`; None if nothing is. Raises OSError."""
    return describe_damage(directory, wrong_files(directory, manifest.files))


Share = tuple[Path, dict[str, SavedFile]]  # the directory of a checkpoint, and those of its files that one rank checks


def shares(candidate: Candidate, ranks: Sequence[int], world_size: int) -> list[Share]:
    """The files of a checkpoint that each of `ranks` checks: each file is checked by one rank."""
    assert candidate.manifest is not None
    return [(candidate.directory, files) for files in shares_of(candidate.manifest.files, ranks, world_size)]


def wrong_in(share: Share) -> list[str]:
    """What is wrong with those files, including files that cannot be checked."""
    try:
        return wrong_files(*share, listed=False)
    except OSError as exc:
        return [str(exc)]


def describe_damage(directory: Path, wrong: Sequence[str]) -> str | None:
    """A message on a checkpoint with what is `wrong` with its files; None if nothing is."""
    return f"{directory.name}: " + "; ".join(wrong) if wrong else None


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
    heading = read_heading(directory)
    if heading is None:  # written by another program, or damaged
        manifest = Manifest.of(directory)
        heading = Heading(manifest.tag, manifest.step, manifest.sequence, manifest.run_id)
    if names.step_of(directory.name) is not None and heading.tag != directory.name:
        raise ValueError(
            f"is the manifest of {heading.tag}, not of {directory.name}: restore that, or rename the directory"
        )
    return [Listed(directory, *heading)]


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


def _cannot_be_used(directory: Path, error: Exception) -> str:
    path = directory / names.MANIFEST
    return f"{path}: cannot be used: " + str(error).removeprefix(f"{path}: ")


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


def _inspect(directory: Path) -> Candidate | str | None:
    """The checkpoint in `directory`, or what is wrong with it; None if it has no manifest.

    Raises OSError or ValueError if the manifest cannot be read.
    """
    if not is_there(directory / names.MANIFEST):
        return None
    manifest = Manifest.of(directory)
    return wrong_with(directory, manifest) or Candidate(directory, manifest.tag, manifest.step, manifest)


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


def discard(temporary: Path) -> None:
    """Remove an unfinished checkpoint after a failed save."""
    shutil.rmtree(temporary, ignore_errors=True)


def collect_files(gathered: Sequence[Sequence[SavedFile]]) -> dict[str, SavedFile]:
    """Files of all ranks by name. Raises ValueError if two ranks wrote the same name."""
    files: dict[str, SavedFile] = {}
    for mine in gathered:
        for file in mine:
            if file.name in files:
                raise ValueError(f"two ranks wrote {file.name}")
            files[file.name] = file
    return files
