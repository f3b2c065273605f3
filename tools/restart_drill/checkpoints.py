"""The checkpoints of the drilled run: which are whole, and damage to a file of the newest."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.checkpointing.commit import Candidate, discover
from megatron.config import CheckpointConfig
from megatron.config.uris import ObjectUri, Place

from .launch import DrillError


class Checkpoints:
    """What is in the directory of --save, apart from what the drill itself has damaged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._damaged: set[tuple[str, int]] = set()

    def make_place(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)

    def is_empty(self) -> bool:
        """Whether there is nothing at all there."""
        return not (self.directory.is_dir() and any(self.directory.iterdir()))

    def remove(self) -> None:
        """Remove them, and the place."""
        shutil.rmtree(self.directory)

    def whole(self) -> list[Candidate]:
        """Complete checkpoints that nobody has damaged, in the order in which a load tries them."""
        return [found for found in self._found() if self._identity(found) not in self._damaged]

    def newest_step(self) -> int:
        """Iteration that a relaunch must resume from. Raises DrillError if there is no checkpoint."""
        return self._at_least(1)[0].step

    def damage(self, fault: str) -> Path | str:
        """Damage the largest file of the newest checkpoint; what a load names then.

        Raises DrillError if that is the only one.
        """
        newest = self._at_least(2)[0]
        assert newest.manifest is not None
        file = max(newest.manifest.files.values(), key=lambda file: (file.num_bytes, file.name))
        named = self._harm(newest, file.name, fault)
        self._damaged.add(self._identity(newest))
        return named

    def _at_least(self, number: int) -> list[Candidate]:
        found = self.whole()
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

    def _harm(self, checkpoint: Candidate, name: str, fault: str) -> Path | str:
        path = checkpoint.directory / name
        _damage_file(path, fault)
        return path

    def _identity(self, checkpoint: Candidate) -> tuple[str, int]:
        """A checkpoint that is saved again under the same name is another one."""
        return str(checkpoint.directory), (checkpoint.directory / "manifest.json").stat().st_mtime_ns


class CheckpointsInBucket(Checkpoints):
    """What is below the prefix of --save. Every save has keys of its own there."""

    def __init__(self, uri: ObjectUri) -> None:
        from megatron.checkpointing.object_storage.checkpoints import open_checkpoints

        self._stored = open_checkpoints("--checkpoints", str(uri), CheckpointConfig())
        super().__init__(self._stored.root)

    def make_place(self) -> None:
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

    def _harm(self, checkpoint: Candidate, name: str, fault: str) -> str:
        """An object has no bytes that could be changed in place: it is replaced, which its ETag tells."""
        from megatron.checkpointing.object_storage.checkpoints import StoredCandidate

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
        from megatron.checkpointing.object_storage.checkpoints import StoredCandidate

        assert isinstance(checkpoint, StoredCandidate)
        return checkpoint.key, 0


def checkpoints_at(place: Place) -> Checkpoints:
    """Raises ObjectStoreError for a URI if there is no client for it."""
    return Checkpoints(place) if isinstance(place, Path) else CheckpointsInBucket(place)


def _damage_file(path: Path, fault: str) -> None:
    (truncate if fault == "truncate" else flip_bit)(path)


def truncate(path: Path) -> None:
    """Cut the second half of a file off."""
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(path: Path) -> None:
    """Flip one bit of the first byte from the middle on that is not zero: of data, and not of padding."""
    with path.open("r+b") as file:
        position = file.seek(path.stat().st_size // 2)
        while (byte := file.read(1)) == b"\0":
            position += 1
        if not byte:
            raise DrillError(f"{path}: nothing but zeros in its second half, so there is no bit of data to flip")
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x10]))
