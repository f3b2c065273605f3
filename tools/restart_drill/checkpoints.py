"""The checkpoints of the drilled run: which are complete, and damage to a file of the newest one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpointing import Candidate, discover
from megatron.config import CheckpointConfig
from megatron.config.uris import Location, ObjectUri

from .launch import DrillError

_BESIDE_CHECKPOINTS = {"latest", "latest_checkpointed_iteration.txt", ".generations"}


class Checkpoints:
    """The checkpoints in the directory of --save, without those that the drill itself has damaged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._damaged: set[tuple[str, int]] = set()

    def create(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)

    def is_empty(self) -> bool:
        """Whether the place holds nothing at all."""
        return not (self.directory.is_dir() and any(self.directory.iterdir()))

    def remove(self) -> None:
        """Remove all checkpoints, and the place that holds them."""
        shutil.rmtree(self.directory)

    def complete(self) -> list[Candidate]:
        """Complete, undamaged checkpoints, in the order in which a load tries them."""
        return [found for found in self._found() if self._identity(found) not in self._damaged]

    def newest_step(self) -> int:
        """Iteration that a relaunch must resume from. Raises DrillError if there is no checkpoint."""
        return self._at_least(1)[0].step

    def damage(self, fault: str) -> Path | str:
        """Damage the largest file of the newest checkpoint. Returns the name by which a load must report it.

        Raises DrillError if that is the only checkpoint.
        """
        newest = self._at_least(2)[0]
        assert newest.manifest is not None
        file = max(newest.manifest.files.values(), key=lambda file: (file.num_bytes, file.name))
        named = self._damage_in(newest, file.name, fault)
        self._damaged.add(self._identity(newest))
        return named

    def _at_least(self, number: int) -> list[Candidate]:
        found = self.complete()
        if len(found) < number:
            raise DrillError(
                f"{self} holds {len(found)} complete checkpoints after the fault, and the drill needs "
                f"{number}: save more often, keep more of them (--keep-last), or inject the fault later"
            )
        return found

    def __str__(self) -> str:
        return str(self.directory)

    def _found(self) -> Sequence[Candidate]:
        return discover(self.directory, None)[0]

    def _damage_in(self, checkpoint: Candidate, name: str, fault: str) -> Path | str:
        path = checkpoint.directory / name
        _damage_file(path, fault)
        return path

    def _identity(self, checkpoint: Candidate) -> tuple[str, int]:
        """Differs between checkpoints that were saved one after the other under the same name."""
        return str(checkpoint.directory), (checkpoint.directory / "manifest.json").stat().st_mtime_ns


class CheckpointsInBucket(Checkpoints):
    """The checkpoints below the prefix of --save. Each save has its own keys."""

    def __init__(self, uri: ObjectUri) -> None:
        from megatron.checkpointing import open_checkpoints

        self._stored = open_checkpoints("--checkpoints", str(uri), CheckpointConfig())
        super().__init__(self._stored.root)

    def create(self) -> None:
        self._stored.bucket.check_reachable(self._stored.uri.key(""))

    def is_empty(self) -> bool:
        return next(self._stored.bucket.list(self._stored.uri.key("")), None) is None

    def remove(self) -> None:
        bucket = self._stored.bucket
        bucket.delete([found.key for found in bucket.list(self._stored.uri.key(""))])

    def __str__(self) -> str:
        return str(self._stored.uri)

    def _found(self) -> Sequence[Candidate]:
        return self._stored.discover(None)[0]

    def _damage_in(self, checkpoint: Candidate, name: str, fault: str) -> str:
        """Objects cannot be changed in place, so the object is replaced, which changes its ETag."""
        from megatron.checkpointing import StoredCandidate

        assert isinstance(checkpoint, StoredCandidate) and checkpoint.manifest is not None
        bucket, key = self._stored.bucket, f"{checkpoint.key}{name}"
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "object"
            stored, file = checkpoint.manifest.objects[name], checkpoint.manifest.files[name]
            bucket.download_file(key, path, file.num_bytes, stored.etag)
            _damage_file(path, fault)
            bucket.upload_file(path, key)
        return f"{checkpoint.uri}: {name}"

    def _identity(self, checkpoint: Candidate) -> tuple[str, int]:
        from megatron.checkpointing import StoredCandidate

        assert isinstance(checkpoint, StoredCandidate)
        return checkpoint.key, 0


def checkpoints_at(place: Location) -> Checkpoints:
    """Raises ObjectStoreError for a URI if no client is installed for it."""
    return Checkpoints(place) if isinstance(place, Path) else CheckpointsInBucket(place)


def left_files(checkpoints: Checkpoints, kept: int) -> list[str]:
    """A message for everything besides the newest `kept` checkpoints, their files, and the files that name them."""
    complete = checkpoints.complete()
    found = [f"more than --keep-last {kept} checkpoints: {len(complete)}"] if len(complete) > kept else []
    known = {candidate.directory.name for candidate in complete} | _BESIDE_CHECKPOINTS
    found += [f"in --save: {path.name}" for path in sorted(checkpoints.directory.iterdir()) if path.name not in known]
    for candidate in complete:
        assert candidate.manifest is not None
        listed = {*candidate.manifest.files, "manifest.json"}
        there = {
            str(path.relative_to(candidate.directory)) for path in candidate.directory.rglob("*") if path.is_file()
        }
        found += [f"in {candidate.directory.name}: {name}" for name in sorted(there - listed)]
    return found


def _damage_file(path: Path, fault: str) -> None:
    (truncate if fault == "truncate" else flip_bit)(path)


def truncate(path: Path) -> None:
    """Cut off the second half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path: Path) -> None:
    """Flip one bit of the first nonzero byte from the middle on, so that data is damaged and not padding."""
    with path.open("r+b") as file:
        position = file.seek(path.stat().st_size // 2)
        while (byte := file.read(1)) == b"\0":
            position += 1
        if not byte:
            raise DrillError(f"{path}: its second half is all zeros, so there is no bit of data to flip")
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x10]))
