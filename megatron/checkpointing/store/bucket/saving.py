"""Saves a checkpoint to object storage: uploads the engine's files, then the manifest.

Engine `lazy` sends its blocks while it makes them. Other engines write to the node's own disk as they do otherwise, and
each rank uploads its files from there.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.checkpointing.engines.base import SavedFile
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.bucket.checkpoints import StoredCandidate, StoredCheckpoints, wrong_objects
from megatron.checkpointing.store.bucket.generations import ObjectOwnership
from megatron.checkpointing.store.manifest import Manifest, StoredObject
from megatron.checkpointing.store.removal import Pruned
from megatron.checkpointing.store.search import Known, newest_first
from megatron.config import ConfigError
from megatron.fileio.checksums import checksum_text
from megatron.fileio.objects.bucket import Bucket, Uploaded
from megatron.fileio.objects.errors import ObjectMissingError, ObjectStoreError
from megatron.fileio.objects.node_directory import NodeDirectory, new_name
from megatron.fileio.objects.upload import ObjectUpload
from restart_trace.recorder import Operation

logger = logging.getLogger(__name__)
_SOON_S = 1.0
_DISCARD_S = 5.0


class ObjectDirectory:
    """Where checkpoints go: a prefix of a bucket, as SaveDirectory is a directory. `ownership` is rank 0's.

    Raises ConfigError if no directory can be made in --storage-cache.
    """

    def __init__(
        self, checkpoints: StoredCheckpoints, rank: int, ownership: ObjectOwnership | None, keep_last: int | None
    ) -> None:
        self._checkpoints = checkpoints
        self._bucket = checkpoints.bucket
        self._uri = checkpoints.uri
        self._ownership = ownership
        self._keep_last = keep_last
        self._sequence: int | None = None  # of the last commit, once it is known
        self._latest: str | None = None  # the version of `latest` that this launch has written
        self._told: set[str] = set()  # places that were left alone, which was said
        self._found: list[StoredCandidate] | None = None  # all there are, if the save under way has asked for them
        self._surplus = True  # there may be checkpoints of which the tag was saved again
        self._streams: Streams | None = None  # of the save under way, if its engine needs no disk
        try:
            self._spool = NodeDirectory(checkpoints.root, new_name(f"save_rank_{rank:05d}"))
        except OSError as error:
            raise ConfigError(
                f"--storage-cache {checkpoints.root}: cannot be used: {error}; correct that, or give another directory"
            ) from error
        if ownership is not None:
            self._remove_unfinished(ownership.generation)

    def __str__(self) -> str:
        return str(self._uri)

    @property
    def run_id(self) -> str:
        return "" if self._ownership is None else self._ownership.run_id

    def temporary(self, tag: str, attempt: str) -> Path:
        """Where the engine of this rank writes its files."""
        return self._spool.path / names.temporary_directory(tag, attempt)

    def check_ownership(self, *, failed: bool = False) -> None:
        if self._ownership is None:
            return
        if not failed:
            self._ownership.check()
            return
        with contextlib.suppress(ObjectStoreError):  # a store that is away does not keep the others from hearing
            self._ownership.check(_SOON_S)

    def streams(self, tag: str, attempt: str, op: Operation) -> Streams:
        self._streams = Streams(self._bucket, self._key(tag, attempt, ""), op)
        return self._streams

    def store(
        self, tag: str, attempt: str, temporary: Path, saved: Sequence[SavedFile], op: Operation, blocking: bool
    ) -> dict[str, StoredObject]:
        """Upload the files of this rank; what they are there, by name. Raises ObjectStoreError."""
        streams = self._streams
        before = replace(self._bucket.traffic) if streams is None else streams.before
        stored: dict[str, StoredObject] = {}
        self._streams = None
        try:
            sent = {} if streams is None else streams.sent()
            for file in saved:
                if file.name in sent:
                    stored[file.name] = _stored(sent[file.name])
                    continue
                with op.span("flush", "upload", file=file.name, blocking=blocking) as span:
                    key = self._key(tag, attempt, file.name)
                    uploaded = self._bucket.upload_file(temporary / file.name, key)
                    span.bytes = file.num_bytes
                stored[file.name] = _stored(uploaded)
        finally:
            op.measure(**self._bucket.traffic.since(before))
        op.durable = True
        return stored

    def next_sequence(self, known: Known) -> int:
        self._found = None
        if self._sequence is None:
            self._found, _ = self._checkpoints.discover(None)
            self._sequence = max((c.manifest.sequence for c in self._found if c.manifest is not None), default=0)
        return self._sequence + 1

    def write_manifest(self, attempt: str, temporary: Path, manifest: Manifest, fsync: bool) -> None:
        """Make the uploaded files a complete checkpoint; on rank 0.

        Raises ObjectStoreError if an object is not there as its rank has told, or if the manifest cannot be written.
        """
        prefix, tagged = self._key(manifest.tag, attempt, ""), self._uri.key(f"{manifest.tag}/")
        there = {info.key: info for info in self._bucket.list(tagged)}
        found = {key.removeprefix(prefix): info for key, info in there.items() if key.startswith(prefix)}
        self._surplus |= any(key.endswith(f"/{names.MANIFEST}") for key in there)
        wrong = wrong_objects(manifest, found)
        if wrong:
            raise ObjectStoreError(f"{self._uri}/{manifest.tag}/{attempt}/ is not complete: {'; '.join(wrong)}")
        text = manifest.to_json()
        Manifest.from_json(text)
        key = self._key(manifest.tag, attempt, names.MANIFEST)
        if self._bucket.create(key, text.encode()) is None:
            raise ObjectStoreError(f"{self._bucket.uri(key)} is another launch's: nothing was overwritten")
        self._sequence = manifest.sequence
        if self._found is not None:
            self._found = newest_first([self._checkpoints.candidate(manifest, attempt, ""), *self._found])

    def publish(self, manifest: Manifest, attempt: str, temporary: Path, fsync: bool, known: Known) -> list[str]:
        """Let `latest` name the checkpoint, which is complete already; returns what did not work."""
        key, content = self._uri.key(names.LATEST), f"{manifest.tag}/{attempt}".encode()
        last, self._latest = self._latest, None
        try:
            if last is not None:
                self._latest = self._bucket.replace(key, content, last)
            if self._latest is None:
                self._latest = self._replace_latest(key, content)
        except ObjectStoreError as exc:
            return [f"{names.LATEST} could not be written: {exc}"]
        return [] if self._latest else [f"{self._bucket.uri(key)} was written by another launch meanwhile"]

    def _replace_latest(self, key: str, content: bytes) -> str | None:
        """Write `latest` over whatever is there; its version, or None if another was written meanwhile."""
        try:
            _, version = self._bucket.get(key, 1 << 16)
        except ObjectMissingError:
            return self._bucket.create(key, content)
        return self._bucket.replace(key, content, version)

    def discard(self, tag: str, attempt: str, temporary: Path, known: Known) -> None:
        """Remove what all ranks have uploaded of a failed save; on rank 0, when no rank uploads any more.

        Training waits, so a store that is away is not waited for.
        """
        try:
            bucket = self._bucket.with_deadline(_DISCARD_S)
            bucket.delete([info.key for info in bucket.list(self._key(tag, attempt, ""))])
            for key, upload in bucket.unfinished_uploads(self._key(tag, attempt, "")):
                bucket.abort_upload(key, upload)
        except ObjectStoreError as exc:
            logger.warning("what was uploaded of the failed save is left for the next launch to remove: %s", exc)

    def prune(self, step: int, known: Known, fsync: bool) -> Pruned:
        """Remove what megatron.checkpointing.store.removal.prune would set aside. Raises ObjectStoreError.

        Where nothing can be surplus the store is not asked: to list all checkpoints takes long where many are kept.
        """
        if self._keep_last is None and not self._surplus:
            return Pruned()
        found = self._checkpoints.discover(None)[0] if self._found is None else self._found
        ours = [candidate for candidate in found if self._is_ours(candidate)]
        to_remove = _superseded(ours)
        if self._keep_last is not None:
            counted = [c for c in ours if c.step <= step and c not in to_remove]
            to_remove += counted[self._keep_last :]
        if to_remove:
            self.check_ownership()
        removed = []
        for candidate in to_remove:
            self._remove(candidate)
            removed.append("/".join(candidate.key.rstrip("/").split("/")[-2:]))
        self._surplus = False
        others = [candidate.place for candidate in found if candidate not in ours and candidate.place not in self._told]
        self._told.update(others)
        return Pruned(removed=removed, left_alone=[f"{place} (saved by another run)" for place in others])

    def _is_ours(self, candidate: StoredCandidate) -> bool:
        """Whether this run has saved it, and it was not copied here; an earlier version did not record that."""
        return candidate.manifest is not None and candidate.manifest.run_id in ("", self.run_id)

    def clear(self, temporary: Path) -> None:
        """Remove the files that were on their way."""
        if self._streams is not None:  # a save that failed before `store`
            self._streams.measure()
            self._streams = None
        shutil.rmtree(temporary, ignore_errors=True)

    def close(self) -> None:
        self._spool.leave()

    def _key(self, tag: str, attempt: str, name: str) -> str:
        return self._uri.key(f"{tag}/{attempt}/{name}")

    def _remove(self, candidate: StoredCandidate) -> None:
        """The manifest first: from then on no load takes what is left for a checkpoint. Then the files it records."""
        assert candidate.manifest is not None
        self._bucket.delete([f"{candidate.key}{names.MANIFEST}"])
        self._bucket.delete([f"{candidate.key}{name}" for name in candidate.manifest.files])

    def _remove_unfinished(self, generation: int) -> None:
        """Remove what earlier generations have uploaded and can never commit. What cannot be removed stays."""
        try:
            prefix = self._uri.key("")
            for key, upload in self._bucket.unfinished_uploads(prefix):
                tag, _, rest = key.removeprefix(prefix).partition("/")
                if names.step_of(tag) is not None and _is_before(rest.partition("/")[0], generation):
                    self._bucket.abort_upload(key, upload)
            for (tag, attempt), found in self._checkpoints.listed().items():
                if names.MANIFEST in found or not _is_before(attempt, generation):
                    continue
                # That listing is from before the imports; a launch that was committing then may have done so since.
                now = [info.key for info in self._bucket.list(self._key(tag, attempt, ""))]
                if self._key(tag, attempt, names.MANIFEST) not in now:
                    self._bucket.delete(now)
        except ObjectStoreError as exc:
            logger.warning("--save %s: what killed saves have left was not removed: %s", self._uri, exc)


class Streams:
    """The objects of one rank and save that its engine sends while it makes them. `before`: requests until then."""

    def __init__(self, bucket: Bucket, prefix: str, op: Operation) -> None:
        self.before = replace(bucket.traffic)
        self._bucket = bucket
        self._prefix = prefix
        self._op = op
        self._uploads: dict[str, ObjectUpload] = {}

    def open(self, name: str, num_bytes: int, data_start: int, block_bytes: int) -> ObjectUpload:
        """As SaveTargets.open."""
        upload = ObjectUpload(self._bucket, self._prefix + name, num_bytes, data_start, block_bytes, self._op)
        self._uploads[name] = upload
        return upload

    def measure(self) -> None:
        """Tell the operation of the requests until now."""
        self._op.measure(**self._bucket.traffic.since(self.before))

    def sent(self) -> dict[str, Uploaded]:
        """What is there as a whole, by name."""
        return {name: upload.result for name, upload in self._uploads.items() if upload.result is not None}


def _stored(uploaded: Uploaded) -> StoredObject:
    return StoredObject(uploaded.etag, checksum_text(uploaded.crc32))


def _is_before(attempt: str, generation: int) -> bool:
    of = names.attempt_generation(attempt)
    return of is not None and of < generation


def _superseded(found: Sequence[StoredCandidate]) -> list[StoredCandidate]:
    """The checkpoints of `found`, which are newest first, whose tag was saved again."""
    seen: set[str] = set()
    to_remove = []
    for candidate in found:
        if candidate.tag in seen:
            to_remove.append(candidate)
        seen.add(candidate.tag)
    return to_remove
