"""The commit protocol on disk, as rank 0 carries it out: publish, discover, prune.

Files are written into `.incomplete_*`; the manifest is written last into that directory, which is then renamed
to its tag; then `latest` is replaced. Every step is synchronised before the next, so at any instant the newest
directory that has a manifest is a complete checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron import checkpoint_layout as names
from megatron.checkpoint_engines.base import SavedFile

logger = logging.getLogger(__name__)

MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json. `files` has every file of the checkpoint but the manifest itself."""

    tag: str
    step: int
    engine: str
    layout: dict[str, int]
    model: dict[str, Any]
    files: dict[str, SavedFile]
    run_id: str = ""
    manifest_version: int = MANIFEST_VERSION

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Raises ValueError, KeyError or TypeError if `text` is not a whole manifest."""
        content = json.loads(text)
        content["files"] = {name: SavedFile(**entry) for name, entry in content["files"].items()}
        return Manifest(**content)


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be loaded. `manifest` is None for one that upstream or DeepSpeed wrote."""

    directory: Path
    tag: str
    step: int
    manifest: Manifest | None


def fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, text: str, fsync: bool) -> None:
    """Replace `path` by `text` so that a reader, or a crash, sees the old or the new content whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        if fsync:
            os.fsync(file.fileno())
    os.replace(temporary, path)


def write_manifest(directory: Path, manifest: Manifest, fsync: bool) -> None:
    """Make the files in `directory` a whole checkpoint."""
    write_atomically(directory / names.MANIFEST, manifest.to_json(), fsync)
    if fsync:
        fsync_directory(directory)


def publish(save_dir: Path, temporary: Path, tag: str, step: int, fsync: bool) -> None:
    """Give the finished `temporary` directory its name and let `latest` name it.

    An older checkpoint of the same tag is moved aside first and stays loadable until the new one is in place.
    """
    final = save_dir / tag
    replaced = save_dir / f"{tag}{names.REPLACED_SUFFIX}"
    if final.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        os.rename(final, replaced)
    os.rename(temporary, final)
    if fsync:
        fsync_directory(save_dir)
    write_atomically(save_dir / names.LATEST, tag, fsync)
    write_atomically(save_dir / names.TRACKER, str(step), fsync)
    if fsync:
        fsync_directory(save_dir)
    if replaced.exists():
        shutil.rmtree(replaced)


def prune(save_dir: Path, keep_last: int | None, current: str) -> list[str]:
    """Remove what no load can use any more; returns the names removed.

    Always: leftovers of saves that were killed. With `keep_last`: all but that many of the newest complete
    checkpoints. The manifest goes first, so that a half-removed checkpoint is not mistaken for a whole one.
    """
    doomed = [p for p in save_dir.iterdir() if p.name.startswith(names.TEMPORARY_PREFIX)]
    if keep_last is not None:
        found, _ = discover(save_dir, None)
        ours = [c for c in found if c.manifest is not None and c.tag != current]
        doomed += [c.directory for c in ours[max(0, keep_last - 1) :]]
    for path in doomed:
        (path / names.MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in doomed]


def discover(load_dir: Path, load_tag: str | None) -> tuple[list[Candidate], list[str]]:
    """Checkpoints in `load_dir` whose files are all there, newest first, and what is wrong with the others.

    Sizes are compared with the manifest; checksums are left to the load. A directory without a manifest counts
    only if `latest` (or `load_tag`) names it: then it is upstream's or DeepSpeed's.
    """
    candidates: list[Candidate] = []
    problems: list[str] = []
    if not load_dir.is_dir():
        return candidates, problems
    for entry in sorted(load_dir.iterdir()):
        if entry.name.startswith(".") or not (entry / names.MANIFEST).is_file():
            continue
        try:
            manifest = Manifest.from_json((entry / names.MANIFEST).read_text())
        except (ValueError, KeyError, TypeError) as exc:
            problems.append(f"{entry / names.MANIFEST}: not a whole manifest ({exc})")
            continue
        wrong = _wrong_files(entry, manifest)
        if wrong:
            problems.append(f"{entry.name}: " + "; ".join(wrong))
        else:
            candidates.append(Candidate(entry, manifest.tag, manifest.step, manifest))
    candidates += _foreign(load_dir, load_tag)
    if load_tag is not None:
        candidates = [c for c in candidates if c.tag == load_tag]
        problems = [p for p in problems if p.startswith(f"{load_tag}:") or f"/{load_tag}/" in p]
    return sorted(candidates, key=lambda c: (-c.step, c.directory.name != c.tag)), problems


def _foreign(load_dir: Path, load_tag: str | None) -> list[Candidate]:
    latest = load_dir / names.LATEST
    tag = load_tag or (latest.read_text().strip() if latest.is_file() else None)
    if not tag or not (load_dir / tag).is_dir() or (load_dir / tag / names.MANIFEST).exists():
        return []
    if not any((load_dir / tag).glob("mp_rank_*_model_states.pt")):
        return []
    return [Candidate(load_dir / tag, tag, names.step_of(tag) or 0, None)]


def _wrong_files(directory: Path, manifest: Manifest) -> list[str]:
    with os.scandir(directory) as entries:
        sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
    wrong = []
    for name, file in manifest.files.items():
        if name not in sizes:
            wrong.append(f"{directory / name} is missing")
        elif sizes[name] != file.num_bytes:
            wrong.append(f"{directory / name} has {sizes[name]} bytes, {file.num_bytes} were saved")
    return wrong


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
