"""The commit protocol on disk, as rank 0 carries it out: publish and discover. megatron.checkpointing.removal removes.

Files are written into `.incomplete_*`; the manifest is written last into that directory, which is then renamed
to its tag; then `latest` is replaced. Every step is synchronised before the next, so at any instant the newest
directory that has a manifest is a complete checkpoint. All renames are the owner's of the directory
(megatron.checkpointing.ownership).

To find the newest takes the first and the last lines of each manifest, whatever number of files it tells of. A manifest
is read when its checkpoint is the next that a load would try, and the files are looked at then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megatron.checkpointing import naming as names
from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.files import missing_files, shares_of, wrong_files
from megatron.checkpointing.manifest import (
    MANIFEST_VERSION,
    MAX_SEQUENCE,
    content_checksum,
    parse_manifest,
    read_beginning,
    read_heading,
    read_latest,
    read_manifest_text,
)
from megatron.checkpointing.ownership import Ownership
from megatron.fileio.files import sync_directory, sync_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredObject:
    """A file as an object of a store: the store's name of its content, and the CRC-32 of all of it ("crc32:...")."""

    etag: str
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json. `files` has every file of the checkpoint but the manifest itself.

    `sequence` counts the commits into a directory from 1: with it, the newest checkpoint is the last one that
    was committed, even after training went back to an earlier step with --load-tag. `loaded_from` is the other
    directory that the run began from, "" if it began from its own or from none. `objects`: of a checkpoint in object
    storage, what each of the files is there.
    What each key may hold is in megatron.checkpointing.manifest: a new one must be told there.
    """

    tag: str
    step: int
    engine: str
    layout: dict[str, int]
    model: dict[str, Any]
    files: dict[str, SavedFile]
    run_id: str = ""
    loaded_from: str = ""
    sequence: int = 1
    manifest_version: int = MANIFEST_VERSION
    objects: dict[str, StoredObject] = field(default_factory=dict)

    def to_json(self) -> str:
        """The content and, under "checksum", the SHA-256 of its canonical JSON."""
        content = asdict(self)
        if not self.objects:
            del content["objects"]
        return json.dumps(content | {"checksum": content_checksum(content)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Raises ValueError if `text` is not a manifest, whole, unaltered, and of the right types."""
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
        """The manifest in `directory` without its files, as `read_beginning`, or whole if it begins otherwise.

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
        """Where it is, for a message."""
        return str(self.directory)

    @property
    def sequence(self) -> float:
        return _NO_MANIFEST if self.manifest is None else self.manifest.sequence


@dataclass(frozen=True)
class Listed:
    """A checkpoint by what says how new it is; nothing else of it was looked at. `sequence`: as of Candidate."""

    directory: Path
    tag: str
    step: int
    sequence: float

    @property
    def has_manifest(self) -> bool:
        return self.sequence != _NO_MANIFEST


_NO_MANIFEST = float("inf")  # upstream's counts only if `latest` names it, so it came last


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
    """Write what is to replace `path` into a temporary file next to it; returns that file.

    Renamed to `path`, it is seen by a reader, or after a crash, whole or not at all.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    # One may be left of a save that was killed; and a FIFO or a link must not be written to.
    temporary.unlink(missing_ok=True)
    with temporary.open("x") as file:
        file.write(text)
        file.flush()
        if fsync:
            sync_file(file.fileno())
    return temporary


@dataclass
class Known:
    """What this launch knows of a directory that it owns, and in which nobody else may change anything.

    It is not looked at again: each look takes as many system calls as there are files, which is ranks and more.
    """

    complete: dict[Path, Candidate] = field(default_factory=dict)  # committed by it, or looked at
    damaged: set[Path] = field(default_factory=set)  # looked at
    # By it, to be removed (megatron.checkpointing.removal); with the manifest that it had, where that is known.
    set_aside: dict[Path, Manifest | None] = field(default_factory=dict)


def next_sequence(save_dir: Path, known: Known | None = None) -> int:
    """Sequence number for the next commit into `save_dir`: one more than that of the checkpoint in `latest`.

    Where `latest` does not name a checkpoint of ours, the manifests of all are read.
    """
    try:
        newest = save_dir / (read_latest(save_dir) or "")
        candidate = known.complete.get(newest) if known is not None else None
        manifest = candidate.manifest if candidate is not None else None
        return min(1 + (manifest or Manifest.of(newest)).sequence, MAX_SEQUENCE)
    except (OSError, ValueError):
        found, _ = discover(save_dir, None, files=False)
        newest = max((c.manifest.sequence for c in found if c.manifest is not None), default=0)
        return min(1 + newest, MAX_SEQUENCE)


def write_manifest(directory: Path, manifest: Manifest, fsync: bool) -> None:
    """Make the files in `directory` a whole checkpoint. Raises ValueError for a manifest that no load would take."""
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
    """Give the finished `temporary` directory its name and let `latest` name it.

    An older checkpoint of the same tag is moved aside first and stays loadable until the new one is in place;
    megatron.checkpointing.removal removes it. Raises OSError, with the older checkpoints as they were, if the storage
    refuses or a file of the manifest is not there; SaveDirectorySupersededError if another launch owns the directory.
    Once the checkpoint is there nothing is raised any more, and what went wrong then is returned: it is no failed save.
    Without `owner` nobody else may write there.

    `manifest`: the one in `temporary`, if each rank has seen its own files there with their sizes. Then it is only
    looked whether this process sees all of them, too; else the sizes are compared, a look at each file.
    """
    with changing(owner):
        found = _inspect(temporary) if manifest is None else _missing(temporary, manifest)
        if isinstance(found, str) or (found is None and manifest is None):
            raise FileNotFoundError(f"{temporary} is not complete: {found or f'it has no {names.MANIFEST}'}")
        return _publish(save_dir, temporary, tag, step, fsync)


def _missing(directory: Path, manifest: Manifest) -> str | None:
    return "; ".join(f"{directory / name} is missing" for name in missing_files(directory, manifest.files)) or None


def changing(owner: Ownership | None) -> contextlib.AbstractContextManager[None]:
    """A context in which no launch claims the directory, as of Ownership."""
    return contextlib.nullcontext() if owner is None else owner.exclusively()


def _publish(save_dir: Path, temporary: Path, tag: str, step: int, fsync: bool) -> list[str]:
    final = save_dir / tag
    replaced = save_dir / f"{tag}{names.REPLACED_SUFFIX}"
    # What needs space comes before the checkpoint appears: a full disk must not leave it half published.
    pointers = {
        save_dir / name: _write_beside(save_dir / name, text, fsync)
        for name, text in ((names.LATEST, tag), (names.TRACKER, str(step)))
    }
    if final.exists():
        if replaced.exists():
            set_aside(replaced)
        os.rename(final, replaced)
    try:
        os.rename(temporary, final)
    except OSError:
        if replaced.exists() and not final.exists():
            os.rename(replaced, final)
        raise
    return _point_to(save_dir, pointers, fsync)


def _point_to(save_dir: Path, pointers: dict[Path, Path], fsync: bool) -> list[str]:
    """Replace `latest` and its like, for a checkpoint that is there already; returns what did not work."""
    wrong = _not_synchronised(save_dir) if fsync else []
    for pointer, written in pointers.items():
        try:
            os.replace(written, pointer)
        except OSError as exc:
            written.unlink(missing_ok=True)
            wrong.append(
                f"{pointer} could not be replaced ({exc.strerror}): remove it, for upstream's programs and DeepSpeed "
                "read it; a load of this program does without"
            )
    return wrong + [what for what in (_not_synchronised(save_dir) if fsync else []) if what not in wrong]


def _not_synchronised(save_dir: Path) -> list[str]:
    try:
        sync_directory(save_dir)
    except OSError as exc:
        return [f"{save_dir} could not be synchronised ({exc.strerror}): it may not survive a power loss"]
    return []


def set_aside(path: Path) -> Path:
    """Give a directory that is to be removed a name that no load looks at, and remove its manifest; its new path.

    So a removal that is killed, at whatever instant, leaves nothing that looks like a checkpoint; and of two launches
    only one has the directory: the one whose rename succeeds. Raises OSError if it was the other, or the storage
    refuses.
    """
    to_remove = path.with_name(f"{names.REMOVED_PREFIX}{path.name.lstrip('.')}_{time.time_ns():x}")
    os.rename(path, to_remove)
    with contextlib.suppress(OSError):
        (to_remove / names.MANIFEST).unlink()
    return to_remove


class Search:
    """The checkpoints of a directory, one after the other as a load tries them: newest first.

    `number` of them; `problems`: what is wrong with others. A directory without a manifest counts only if `latest` (or
    `load_tag`) names it: then it is upstream's or DeepSpeed's. A `latest` that names nothing is something wrong, too.
    Raises OSError if the directory itself cannot be read.
    """

    def __init__(self, load_dir: Path, load_tag: str | None, known: Known | None = None) -> None:
        self.problems: list[str] = []
        self._known = known or Known()
        self._left: list[Listed] = []
        self._bare: list[Path] = []  # of a step, and without a manifest
        self._newest: Listed | None = None  # of those that were not rejected
        self._given: Listed | None = None
        if load_dir.is_dir():
            self._list(load_dir, load_tag)
        self.number = len(self._left)

    @property
    def steps(self) -> list[int]:
        """Of those that were not given yet, in their order."""
        return [one.step for one in self.listed()]

    def listed(self) -> list[Listed]:
        """Those that were not given yet, newest first."""
        return newest_first(self._left, self._newest)

    def next(self) -> tuple[Candidate | None, list[str]]:
        """The next one, or what is wrong with it. Its files were not looked at."""
        self._accept()
        one = self._given = self.listed()[0]
        self._left.remove(one)
        found = self._known.complete.get(one.directory)
        if found is not None or not one.has_manifest:
            return found or Candidate(one.directory, one.tag, one.step, None), []
        try:
            manifest = Manifest.of(one.directory)
        except (OSError, ValueError) as exc:
            return None, self.reject(_cannot_be_used(one.directory, exc))
        return Candidate(one.directory, manifest.tag, manifest.step, manifest), []

    def reject(self, why: str) -> list[str]:
        """The last one was no checkpoint to load: `why`, and what else is wrong because of that."""
        self._given = None
        return [why, *self._passed_over()]

    def _accept(self) -> None:
        if self._newest is None:
            self._newest = self._given
        self._given = None

    def _list(self, load_dir: Path, load_tag: str | None) -> None:
        # Before the directories are: a job that saves meanwhile has published a checkpoint by the time `latest` names
        # it.
        latest, unreadable = _read_latest(load_dir)
        directories = sorted(p for p in load_dir.iterdir() if p.is_dir() and not p.name.startswith("."))
        problems: list[tuple[str, str]] = []  # (tag, what is wrong)
        for directory in directories:
            try:
                listed = _listed(directory, self._known)
            except (OSError, ValueError) as exc:
                problems.append((directory.name, _cannot_be_used(directory, exc)))
            else:
                self._left += listed
        with_manifest = {one.directory for one in self._left} | {load_dir / tag for tag, _ in problems}
        self._left += _foreign(load_dir, load_tag or latest)
        self._bare = [p for p in directories if p not in with_manifest and names.step_of(p.name) is not None]
        if load_tag is not None:
            self._left = [one for one in self._left if one.tag == load_tag]
            self._bare = [path for path in self._bare if path.name == load_tag]
            problems = [p for p in problems if p[0].removesuffix(names.REPLACED_SUFFIX) == load_tag]
            self.problems = [what for _, what in problems] + self._passed_over()
            return
        bare = list(self._bare)
        passed_over = self._passed_over()
        told = {one.tag for one in self._left} | {tag.removesuffix(names.REPLACED_SUFFIX) for tag, _ in problems}
        told |= {path.name for path in bare if path not in self._bare}
        self.problems = [what for _, what in problems + unreadable] + passed_over
        if latest is not None and latest not in told and _read_latest(load_dir)[0] == latest:
            self.problems.append(names_nothing(load_dir, latest))

    def _passed_over(self) -> list[str]:
        """Newer steps than all that may be loaded whose manifest is gone: what is wrong, once of each.

        Older ones may be upstream's, which keeps no manifest, and are no concern of this load.
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
    """All checkpoints of a Search, newest first, and what is wrong with others.

    With `files`, those whose files are all there: a look at each file of each. Sizes are compared with the manifest;
    checksums are left to the load.
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
    """What of the files of the checkpoint in `directory` is not there as it was saved. Raises OSError."""
    return told_wrong(directory, wrong_files(directory, manifest.files))


Share = tuple[Path, dict[str, SavedFile]]  # files of the checkpoint in a directory that one rank looks at


def shares(candidate: Candidate, ranks: Sequence[int], world_size: int) -> list[Share]:
    """What each of `ranks` is to look at of a checkpoint: each file is looked at by one rank."""
    assert candidate.manifest is not None
    return [(candidate.directory, files) for files in shares_of(candidate.manifest.files, ranks, world_size)]


def wrong_in(share: Share) -> list[str]:
    """What is wrong with those files. What cannot be looked at is wrong, too."""
    try:
        return wrong_files(*share, listed=False)
    except OSError as exc:
        return [str(exc)]


def told_wrong(directory: Path, wrong: Sequence[str]) -> str | None:
    """What is wrong with a checkpoint, by what is `wrong` with its files; None if nothing is."""
    return f"{directory.name}: " + "; ".join(wrong) if wrong else None


def _listed(directory: Path, known: Known) -> list[Listed]:
    """The checkpoint in `directory`; none without a manifest. Raises OSError or ValueError if that cannot be read."""
    if directory in known.complete:
        one = known.complete[directory]
        return [Listed(directory, one.tag, one.step, one.sequence)]
    if not os.path.lexists(directory / names.MANIFEST):
        return []
    heading = read_heading(directory)
    if heading is None:  # it was written by others, or is damaged
        manifest = Manifest.of(directory)
        heading = manifest.tag, manifest.step, manifest.sequence
    return [Listed(directory, *heading)]


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
    """What is wrong with a `latest` that names a tag of which there is no checkpoint."""
    why = "in which there is no checkpoint" if os.path.isdir(load_dir / latest) else "which is not there"
    return f"{load_dir / names.LATEST} names {latest}, {why}"


def newest_first(candidates: Sequence[_AnyAged], newest: _Aged | None = None) -> list[_AnyAged]:
    """In the order in which a load tries them: last committed first.

    Steps beyond those of the newest checkpoint belong to a course that was given up by going back (--load-tag): they
    come after all others. `newest`: that one, if it is none of `candidates`.
    """

    def age(candidate: _Aged) -> tuple[float, int, bool]:
        return -candidate.sequence, -candidate.step, candidate.directory.name != candidate.tag

    ordered = sorted(candidates, key=age)
    if not ordered:
        return []
    step = ordered[0].step if newest is None else newest.step
    return sorted(ordered, key=lambda c: c.step > step)


def _inspect(directory: Path) -> Candidate | str | None:
    """The checkpoint in `directory`, or what is wrong with it; None without a manifest.

    Raises OSError or ValueError if the manifest cannot be read.
    """
    if not os.path.lexists(directory / names.MANIFEST):
        return None
    manifest = Manifest.of(directory)
    return wrong_with(directory, manifest) or Candidate(directory, manifest.tag, manifest.step, manifest)


def _foreign(load_dir: Path, tag: str | None) -> list[Listed]:
    """The checkpoint called `tag`, if upstream or DeepSpeed wrote it."""
    if tag is None or os.path.lexists(load_dir / tag / names.MANIFEST) or not is_upstreams(load_dir / tag):
        return []
    return [Listed(load_dir / tag, tag, names.step_of(tag) or 0, _NO_MANIFEST)]


def is_upstreams(directory: Path) -> bool:
    """Whether it has files of upstream's or DeepSpeed's; those of this program have the same names."""
    return directory.is_dir() and any(directory.glob("mp_rank_*_model_states.pt"))


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
