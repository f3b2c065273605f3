"""The checkpoints below a prefix of a bucket: finds them, and fetches their files to the node's own disk.

SAVE/global_step5/g3_1/ has the files of the first save of generation 3. Its manifest is written last, on the condition
that there is none, and names each object by its ETag. With the manifest the checkpoint is complete; objects without one
belong to a save that was never committed. Nothing is renamed or overwritten.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron.checkpointing.engines.base import CheckpointEngine, Copies, SavedCheckpoint
from megatron.checkpointing.engines.errors import CheckpointDamagedError, NoChecksumsError
from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.manifest import Manifest
from megatron.checkpointing.store.search import Candidate, newest_first
from megatron.config import CheckpointConfig
from megatron.config.uris import ObjectUri, parse_uri
from megatron.fileio.checksums import checksum_text
from megatron.fileio.files import DamagedFileError
from megatron.fileio.objects.bucket import Bucket, ObjectInfo, open_bucket
from megatron.fileio.objects.errors import ObjectMissingError, ObjectStoreError
from megatron.fileio.objects.node_directory import NodeDirectory, default_root, new_name
from megatron.fileio.objects.ranges import ObjectFile
from megatron.processes.in_process_restart import spare_connections_to
from restart_trace.recorder import Operation
from restart_trace.under_way import READING, UnderWay

logger = logging.getLogger(__name__)

_MAX_MANIFEST = 1 << 30  # bytes
_MAX_LATEST = 512
_AT_ONCE = 8  # manifests that are read


@dataclass(frozen=True)
class StoredCandidate(Candidate):
    """A complete checkpoint in object storage. `directory`: where its files are to be on each node; `uri`: its own."""

    uri: str = ""
    key: str = ""  # what the keys of its files begin with, with a slash at the end

    @property
    def place(self) -> str:
        return self.uri.rstrip("/")


Attempts = dict[tuple[str, str], dict[str, ObjectInfo]]  # (tag, attempt) -> name of a file -> its object


@dataclass
class _Listing:
    """What one listing of a prefix has found. `foreign`: keys of what this program did not write.

    `after`: as generations.ended_generation before the listing. `manifests`: those read since, by key: no manifest is
    ever overwritten. `latest`: what that named before this listing, if the listing before did not have it.
    """

    attempts: Attempts
    foreign: list[str]
    after: int | None = None
    manifests: dict[str, Manifest] = field(default_factory=dict)
    latest: str | None = None


# Of the start under way, on rank 0: many parts of it ask what is there, and a listing takes long where much is.
_kept: dict[ObjectUri, _Listing] = {}


def drop_listings() -> None:
    """List again from here on: the start is over, or another one begins."""
    _kept.clear()


class StoredCheckpoints:
    """What is below a prefix. `root`: on the node's own disk, for files on their way."""

    def __init__(self, uri: ObjectUri, bucket: Bucket, root: Path) -> None:
        self.uri = uri
        self.bucket = bucket
        self.root = root

    def list_once(self, after: int | None = None) -> None:
        """List, and keep that for all that this process asks until `drop_listings`. `after`: as in _Listing."""
        before = _kept.pop(self.uri, None)
        _kept[self.uri] = self._list(after)
        if before is not None:
            _kept[self.uri].manifests, _kept[self.uri].latest = before.manifests, before.latest

    def claimed(self, generation: int) -> None:
        """This launch is now the owner: what was listed before is kept if no other launch can have committed since."""
        kept = _kept.get(self.uri)
        if kept is not None and kept.after != generation - 1:
            self.list_once(generation - 1)

    def discover(self, load_tag: str | None) -> tuple[list[StoredCandidate], list[str]]:
        """As discover of store/search.py: what can be loaded, newest first, and what is wrong with others.

        One listing of all keys below the prefix and a request for each manifest, several at once. Keys that are none of
        a checkpoint's are left alone.
        """
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="object") as pool:
            listed = {place: found for place, found in self.listed().items() if names.MANIFEST in found}
            reading = pool.submit(self.read_latest)
            judged = [pool.submit(self._judge, *place, found) for place, found in listed.items()]
            latest = reading.result()
            results = [each.result() for each in judged]
        kept = _kept.get(self.uri)
        if kept is not None and latest not in (None, kept.latest, *(f"{tag}/{attempt}" for tag, attempt in listed)):
            kept.latest = latest
            self.list_once(kept.after)
            return self.discover(load_tag)  # another launch has committed it since that listing, or it is gone
        token = new_name("load")
        candidates: list[StoredCandidate] = []
        problems: list[tuple[str, str]] = []  # (tag, what is wrong)
        for (tag, attempt), result in zip(listed, results, strict=True):
            if isinstance(result, str):
                problems.append((tag, result))
            elif result is not None:
                candidates.append(self.candidate(result, attempt, token))
        if load_tag is None and latest is not None and self._is_gone(latest, listed):
            problems.append((latest, f"{self.uri}/{names.LATEST} names {latest}, which is not there"))
        ordered = newest_first(candidates)
        if load_tag is not None:
            return [c for c in ordered if c.tag == load_tag], [what for tag, what in problems if tag == load_tag]
        return ordered, [what for _, what in problems]

    def candidate(self, manifest: Manifest, attempt: str, token: str) -> StoredCandidate:
        """The checkpoint that an attempt has committed; a load fetches its files to the directory `token` of a node."""
        directory, key = self.root / token / f"{manifest.tag}_{attempt}", self.uri.key(f"{manifest.tag}/{attempt}/")
        return StoredCandidate(directory, manifest.tag, manifest.step, manifest, self.bucket.uri(key), key)

    def _judge(self, tag: str, attempt: str, found: dict[str, ObjectInfo]) -> Manifest | str | None:
        """The manifest of a complete checkpoint, or what is wrong with it; None if it was removed meanwhile.

        `found`: its objects, by name.
        """
        key = self.uri.key(f"{tag}/{attempt}/")
        try:
            manifest = self._manifest(f"{key}{names.MANIFEST}")
            wrong = wrong_objects(manifest, found) if manifest.tag == tag else [f"it names {manifest.tag}"]
        except ObjectMissingError:
            return None
        except ValueError as exc:
            return f"{self.bucket.uri(key)}: {names.MANIFEST} cannot be used: {exc}"
        return f"{self.bucket.uri(key)}: {'; '.join(wrong)}" if wrong else manifest

    def _is_gone(self, latest: str, listed: Iterable[tuple[str, str]]) -> bool:
        """Whether `latest` still names this, "TAG/ATTEMPT", and there is no such checkpoint: it may be newer."""
        if latest in {f"{tag}/{attempt}" for tag, attempt in listed}:
            return False
        present = {f"{tag}/{attempt}" for (tag, attempt), found in self.listed().items() if names.MANIFEST in found}
        return latest not in present and self.read_latest() == latest

    def newest_manifest(self, load_tag: str | None) -> StoredCandidate | None:
        """The checkpoint that a load most likely tries first."""
        found, _ = self.discover(load_tag)
        return found[0] if found else None

    def _manifest(self, key: str) -> Manifest:
        """The manifest; read again if it arrives damaged, as the transfer may have damaged it.

        Raises ValueError, and ObjectMissingError.
        """
        kept = _kept.get(self.uri)
        if kept is not None and key in kept.manifests:
            return kept.manifests[key]
        try:
            manifest = Manifest.from_json(self.bucket.get(key, _MAX_MANIFEST)[0].decode())
        except ValueError:
            manifest = Manifest.from_json(self.bucket.get(key, _MAX_MANIFEST)[0].decode())
        if kept is not None:
            kept.manifests[key] = manifest
        return manifest

    def listed(self) -> Attempts:
        """All attempts at saves, committed or not."""
        return self.survey()[0]

    def survey(self) -> tuple[Attempts, list[str]]:
        """What `listed` returns, and the keys of what else is below the prefix, which this program did not write."""
        found = _kept.get(self.uri) or self._list(None)
        return found.attempts, found.foreign

    def _list(self, after: int | None) -> _Listing:
        prefix = self.uri.key("")
        found: Attempts = {}
        foreign: list[str] = []
        for info in self.bucket.list(prefix):
            tag, _, rest = info.key.removeprefix(prefix).partition("/")
            attempt, _, name = rest.partition("/")
            if name and names.step_of(tag) is not None and names.attempt_generation(attempt) is not None:
                found.setdefault((tag, attempt), {})[name] = info
            elif tag != names.GENERATIONS and (tag, rest) != (names.LATEST, ""):
                foreign.append(info.key)
        return _Listing(found, foreign, after)

    def read_latest(self) -> str | None:
        """ "TAG/ATTEMPT" of the checkpoint committed last; None if there is none, or if that is no text."""
        try:
            return self.bucket.get(self.uri.key(names.LATEST), _MAX_LATEST)[0].decode("ascii", "replace").strip()
        except ObjectMissingError:
            return None

    def check_latest(self) -> None:
        """Raises ObjectStoreError if another program has written `latest`, which a save would replace."""
        tag, _, attempt = (self.read_latest() or "").partition("/")
        if tag and (names.step_of(tag) is None or names.attempt_generation(attempt) is None):
            raise ObjectStoreError(
                f"{self.uri}/{names.LATEST} is not this program's, and a save would replace it; give another prefix, "
                "or remove it"
            )

    def fetch(self, candidate: StoredCandidate, wanted: Iterable[str], op: Operation) -> None:
        """Have the files called `wanted` in `candidate.directory`.

        Raises CheckpointDamagedError naming the object that is missing, or not what was saved.
        """
        manifest = candidate.manifest
        assert manifest is not None
        for name in wanted:
            path = candidate.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            uri = f"{candidate.uri}{name}"
            marker = UnderWay(READING, "the download of", uri)
            with marker, op.span("load", "download", file=name) as span, _alone(path):
                if not path.exists():  # another rank of the node may have fetched it
                    num_bytes = manifest.files[name].num_bytes
                    self._fetch(candidate, name, path, num_bytes)
                    span.bytes = num_bytes

    def _fetch(self, candidate: StoredCandidate, name: str, path: Path, num_bytes: int) -> None:
        """Download a file; again if it arrives damaged, as the transfer may have damaged it."""
        assert candidate.manifest is not None
        stored = candidate.manifest.objects[name]
        partial = path.with_name(f".{path.name}.part")
        for _ in range(2):
            partial.unlink(missing_ok=True)
            try:
                crc = self.bucket.download_file(f"{candidate.key}{name}", partial, num_bytes, stored.etag)
            except DamagedFileError as exc:
                raise CheckpointDamagedError(str(exc)) from exc
            if checksum_text(crc) == stored.checksum:
                os.rename(partial, path)
                return
        partial.unlink(missing_ok=True)
        raise CheckpointDamagedError(f"{candidate.uri}{name}: does not have the checksum that it was saved with")


class NodeFiles:
    """Fetches files of checkpoints that one `discover` has found, each once for all ranks of the node."""

    def __init__(self, stored: StoredCheckpoints) -> None:
        self._stored = stored
        self._held: NodeDirectory | None = None
        self._before = replace(stored.bucket.traffic)

    def fetch(self, candidate: Candidate, wanted: Iterable[str], op: Operation) -> None:
        """Have the files called `wanted` in `candidate.directory`; raises as StoredCheckpoints.fetch."""
        assert isinstance(candidate, StoredCandidate)
        if self._held is None:
            self._held = NodeDirectory(self._stored.root, candidate.directory.parent.name)
        try:
            self._stored.fetch(candidate, wanted, op)
        finally:
            self.measure(op)

    def measure(self, op: Operation) -> None:
        """Tell `op` of the requests until now."""
        op.measure(**self._stored.bucket.traffic.since(self._before))

    def copies(
        self, candidate: Candidate, reader: CheckpointEngine, states: Sequence[str], extra: Sequence[str], op: Operation
    ) -> Copies:
        """As OpenedCheckpoint.copies of megatron.checkpointing.load.storage.

        If the engine verifies ranges, it reads the files in ranges. Otherwise, and if a range arrives damaged, the
        files are fetched to the node's disk. Raises CheckpointDamagedError as StoredCheckpoints.fetch.
        """
        assert candidate.manifest is not None
        files = candidate.manifest.files
        fetched = SavedCheckpoint(candidate.directory, files)
        wanted = {file.name: file for state in states for file in fetched.holding(state)}
        self.fetch(candidate, [name for name in extra if name in files], op)
        if reader.reads_ranges_of(wanted.values()):
            try:
                yield self.in_ranges(candidate, op)
            except NoChecksumsError:
                logger.debug("%s is fetched before it is read", candidate.place)
            except CheckpointDamagedError as exc:
                logger.warning("%s; it is read once more", str(exc).replace(str(candidate.directory), candidate.place))
            finally:
                self.measure(op)
        self.fetch(candidate, wanted, op)
        yield fetched

    def in_ranges(self, candidate: Candidate, op: Operation) -> SavedCheckpoint:
        """The checkpoint with its files where they are."""
        manifest, bucket = candidate.manifest, self._stored.bucket
        assert isinstance(candidate, StoredCandidate) and manifest is not None

        def opened(path: Path) -> ObjectFile:
            name = str(path.relative_to(candidate.directory))
            key, etag = f"{candidate.key}{name}", manifest.objects[name].etag
            return ObjectFile(bucket, key, etag, manifest.files[name].num_bytes, name, op)

        return SavedCheckpoint(candidate.directory, manifest.files, opened)

    def on_this_node(self, candidate: StoredCandidate) -> StoredCandidate:
        """One that another node has discovered, with its directory on this one."""
        there = candidate.directory
        return replace(candidate, directory=self._stored.root / there.parent.name / there.name)

    def close(self) -> None:
        """Remove the files, if this is the last of the node's ranks that uses them."""
        if self._held is not None:
            self._held.leave()


def wrong_objects(manifest: Manifest, found: dict[str, ObjectInfo]) -> list[str]:
    """What of the manifest's files is not among the objects `found`, by name, as it was saved."""
    wrong = []
    for name, file in manifest.files.items():
        stored, there = manifest.objects.get(name), found.get(name)
        if there is None:
            wrong.append(f"{name} is missing")
        elif stored is None:
            wrong.append(f"{names.MANIFEST} does not tell which object {name} is")
        elif there.num_bytes != file.num_bytes:
            wrong.append(f"{name} has {there.num_bytes} bytes, {file.num_bytes} were saved")
        elif there.etag != stored.etag:
            wrong.append(f"{name} was replaced: its ETag is not the one that was saved")
    return wrong


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Within it, no other rank of the node fetches the file at `path`."""
    fd = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def open_checkpoints(flag: str, text: str, options: CheckpointConfig) -> StoredCheckpoints:
    """Those of the URI `text`. Raises ConfigError naming `flag`, or ObjectStoreError if the library is missing."""
    uri = parse_uri(flag, text)
    root = Path(options.storage_cache) if options.storage_cache is not None else default_root()
    bucket = open_bucket(uri.scheme, uri.bucket, options.storage_deadline)
    spare_connections_to(bucket.endpoint)
    return StoredCheckpoints(uri, bucket, root)
