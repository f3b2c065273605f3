"""The commit of a checkpoint on disk, by rank 0: manifest, rename, `latest`. search.py finds, removal.py removes.

Files are written into `.incomplete_*`; the manifest is written last into that directory, which is then renamed to its
tag; then `latest` is replaced. Every step is synchronised before the next, so at any instant the newest directory with
a manifest is a complete checkpoint. Only the owner of the directory renames (megatron.checkpointing.store.ownership).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.files import missing_files
from megatron.checkpointing.store.manifest import MAX_SEQUENCE, Heading, Manifest
from megatron.checkpointing.store.ownership import Ownership
from megatron.checkpointing.store.search import Known, Search
from megatron.fileio.files import is_there, sync_directory, sync_file

logger = logging.getLogger(__name__)


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
    save_dir: Path, temporary: Path, manifest: Manifest, fsync: bool, owner: Ownership | None = None
) -> list[str]:
    """Rename the finished `temporary` directory, which holds `manifest`, to its tag and let `latest` name it.

    Each rank has checked the sizes of its own files there; this process checks that it sees all of them. An older
    checkpoint of the same tag is moved aside first, and stays loadable until the new one is in place; removal.py
    removes it. Raises OSError, with the older checkpoints unchanged, if the storage refuses or a file of the manifest
    is missing; SaveDirectorySupersededError if another launch owns the directory. Errors after the rename are returned,
    not raised, since the checkpoint is then committed. Without `owner` no other launch may write there.
    """
    with changing(owner):
        missing = missing_files(temporary, [names.MANIFEST, *manifest.files])
        if missing:
            what = "; ".join(f"{temporary / name} is missing" for name in missing)
            raise FileNotFoundError(f"{temporary} is not complete: {what}")
        run_id = "" if owner is None else owner.run_id
        return _publish(save_dir, temporary, manifest.tag, manifest.step, fsync, run_id)


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
        heading = Heading.of(directory)
    except (OSError, ValueError):
        return f"without a {names.MANIFEST} that can be read"
    return why_of_others(directory.name, heading.tag, heading.run_id, run_id)


def why_of_others(name: str, tag: str, saved_by: str, run_id: str) -> str | None:
    """As `why_not_own`, of a directory called `name` whose manifest says `tag` and, as the run, `saved_by`."""
    if name.removesuffix(names.REPLACED_SUFFIX) != tag:
        return f"saved as {tag}"
    return None if saved_by in ("", run_id) else "saved by another run"


def discard(temporary: Path) -> None:
    """Remove an unfinished checkpoint after a failed save."""
    shutil.rmtree(temporary, ignore_errors=True)


def collect_files(gathered: Sequence[Sequence[SavedFile]]) -> dict[str, SavedFile]:
    """Files of all ranks by name, those that ranks share with all their parts.

    Raises ValueError if two ranks wrote the same name otherwise, or parts that do not fit together.
    """
    files: dict[str, SavedFile] = {}
    shared: dict[str, list[SavedFile]] = {}
    for mine in gathered:
        for file in mine:
            if file.parts:
                shared.setdefault(file.name, []).append(file)
            elif file.name in files:
                raise ValueError(f"two ranks wrote {file.name}")
            files[file.name] = file
    for name, found in shared.items():
        parts = [part for file in found for part in file.parts]
        states = {state for part in parts for state in part.states}
        if len({file.num_bytes for file in found}) > 1 or len(states) < sum(len(part.states) for part in parts):
            raise ValueError(f"ranks that share {name} differ in its size, or have written one state twice")
        files[name] = found[0].with_parts(parts)
    return files


def parts_of_ranks(files: Mapping[str, SavedFile]) -> list[SavedFile]:
    """What the ranks have written, in order of their files: a shared file once for each rank, with only its part."""
    return [part for name in sorted(files) for part in files[name].split()]
