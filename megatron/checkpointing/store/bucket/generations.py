"""Ownership of a prefix of a bucket: as store/ownership.py, with conditional writes instead of a lock.

A launch claims a generation by writing SAVE/.generations/00000003 on the condition that the object does not exist, so
of two launches one succeeds. The owner's heartbeat is to write the object again, on the condition that nobody else has
written it since. Keys of checkpoints contain the generation: a launch that does not know yet that it was superseded
overwrites nothing.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any

from megatron.checkpointing.store import naming as names
from megatron.checkpointing.store.ownership import (
    MAX_OWNER_BYTES,
    RUN_ID_BYTES,
    Owner,
    generations_among,
    in_use,
    is_run_id,
    new_owner,
    owner_of,
    runs_here,
    superseded,
)
from megatron.config.uris import ObjectUri
from megatron.fileio.objects.bucket import Bucket
from megatron.fileio.objects.errors import ObjectMissingError, ObjectStoreError
from megatron.processes.patience import looks
from restart_trace.strict_json import parse_json

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0  # each is a request, which stores charge for
PATIENCE_S = 2.5 * HEARTBEAT_S  # how long a new launch looks whether the heart of an owner beats
_POLL_S = 0.05
_RUN_ID = f"{names.GENERATIONS}/run_id"


@dataclass(frozen=True)
class _Seen:
    """An owner as the store has it."""

    owner: Owner
    version: str = ""
    released: bool = False  # it has ended by itself


class ObjectOwnership:
    """This launch's hold on a prefix; of rank 0 alone. All methods may be called from any thread.

    `run_id`, `follows_itself`: as of megatron.checkpointing.store.ownership.Ownership.
    """

    def __init__(
        self, bucket: Bucket, uri: ObjectUri, owner: Owner, version: str, run_id: str, *, follows_itself: bool = False
    ) -> None:
        self.owner = owner
        self.run_id = run_id
        self.follows_itself = follows_itself
        self._bucket = bucket
        self._uri = uri
        self._version: str | None = version
        self._beats = 0
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="owner-heartbeat", daemon=True)
        self._heart.start()

    @property
    def generation(self) -> int:
        return self.owner.generation

    def check(self, deadline_s: float | None = None) -> None:
        """Raises SaveDirectorySupersededError if a later launch owns the prefix, ObjectStoreError without an answer.

        `deadline_s`: for each request, if not the bucket's.
        """
        newest = max(_generations(self._bucket, self._uri, deadline_s), default=None)
        if newest is None or newest < self.generation:
            logger.warning("--save %s: %s was emptied; going on as its owner", self._uri, names.GENERATIONS)
            self._version = self._bucket.create(_key(self._uri, self.generation), self._content())
            self._bucket.create(self._uri.key(_RUN_ID), self.run_id.encode())
        elif newest > self.generation:
            seen = _newest(self._bucket, self._uri)
            raise superseded(self._uri, seen.owner if seen else newest, self.owner)

    def release(self) -> None:
        """Tell later launches that this one has ended: they need not look whether it is alive."""
        self._ended.set()
        self._heart.join()
        self._write(released=True)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            self._write()

    def _write(self, released: bool = False) -> None:
        """Write the owner's object, unless a successor has written it. The store may be unreachable for a while."""
        if self._version is None:
            return
        self._beats += 1
        try:
            content = self._content(released)
            self._version = self._bucket.replace(_key(self._uri, self.generation), content, self._version)
        except ObjectStoreError as exc:
            logger.debug("no heartbeat: %s", exc)

    def _content(self, released: bool = False) -> bytes:
        return _content_of(self.owner, self._beats, released)


def claim(
    bucket: Bucket, uri: ObjectUri, launch_key: str = "", *, take_over: bool = False, restarted: bool = False
) -> ObjectOwnership:
    """Become the owner of the prefix; for rank 0. As megatron.checkpointing.store.ownership.claim.

    Raises ObjectStoreError if the prefix cannot be written, or the store does not keep to the conditions of requests.
    """
    while True:
        present = _newest(bucket, uri)
        own = restarted and present is not None and present.owner.launch_key == launch_key != ""
        if present is not None and not take_over and not own and _is_alive(bucket, uri, present):
            raise in_use(uri, present.owner)
        mine = new_owner(1 if present is None else present.owner.generation + 1, launch_key)
        key = _key(uri, mine.generation)
        version = bucket.create(key, _content_of(mine, 0, False))
        if version is None:
            continue  # another launch was first
        _check_conditions(bucket, uri, key, mine)
        # The number may have been free only because later owners had removed the older ones.
        there = _generations(bucket, uri)
        if max(there) == mine.generation:
            bucket.delete([_key(uri, number) for number in there if number < mine.generation])
            return ObjectOwnership(bucket, uri, mine, version, _run_id(bucket, uri), follows_itself=own)


def ended_generation(bucket: Bucket, uri: ObjectUri) -> int | None:
    """The newest generation, if its launch has ended for certain and commits nothing more; 0 if there is none.

    None if it may still run: on another host only its heartbeat tells, which takes a while to be sure.
    """
    present = _newest(bucket, uri)
    if present is None:
        return 0
    ended = present.released or runs_here(present.owner) is False
    return present.owner.generation if ended else None


def _check_conditions(bucket: Bucket, uri: ObjectUri, key: str, mine: Owner) -> None:
    """Raises ObjectStoreError if the store writes an object although its condition does not hold."""
    other = _content_of(mine, -1, False)
    if bucket.create(key, other) is not None or bucket.replace(key, other, bucket.no_version) is not None:
        bucket.delete([key])
        raise ObjectStoreError(
            f"{uri}: the store does not keep to If-None-Match and If-Match, without which two launches could overwrite "
            "each other's checkpoints; use a store with conditional writes"
        )


def _newest(bucket: Bucket, uri: ObjectUri) -> _Seen | None:
    """The present owner; None if there is none. An unreadable object still counts by its number."""
    while numbers := _generations(bucket, uri):
        newest = max(numbers)
        try:
            text, version = bucket.get(_key(uri, newest), MAX_OWNER_BYTES)
        except ObjectMissingError:  # a later launch has removed it
            time.sleep(_POLL_S)
            continue
        try:
            content: Any = parse_json(text.decode())
            released = bool(content.pop("released"))
            content.pop("beat")
            return _Seen(owner_of(newest, content), version, released)
        except (ValueError, TypeError, AttributeError, KeyError):
            return _Seen(Owner(newest, launch_id="unknown"), version)
    return None


def _is_alive(bucket: Bucket, uri: ObjectUri, seen: _Seen) -> bool:
    """Whether the owner runs for certain: on this host by its process, else by a heartbeat within PATIENCE_S."""
    if seen.released:
        return False
    known = runs_here(seen.owner)
    if known is not None:
        return known
    for _ in looks(PATIENCE_S, min(HEARTBEAT_S / 5, PATIENCE_S)):
        now = _newest(bucket, uri)
        if now is None or now.owner != seen.owner or now.released:
            return False
        if now.version != seen.version:
            return True
    return False


def _generations(bucket: Bucket, uri: ObjectUri, deadline_s: float | None = None) -> list[int]:
    prefix = uri.key(f"{names.GENERATIONS}/")
    return generations_among(info.key.removeprefix(prefix) for info in bucket.list(prefix, deadline_s))


def _run_id(bucket: Bucket, uri: ObjectUri) -> str:
    """The id of the run that saves below the prefix, made at the first claim (see store/ownership.py)."""
    while (found := run_id_there(bucket, uri)) is None:
        new = uuid.uuid4().hex
        if bucket.create(uri.key(_RUN_ID), new.encode()) is not None:
            return new
    return found  # another launch was first


def run_id_there(bucket: Bucket, uri: ObjectUri) -> str | None:
    """The id of the run that saves below the prefix; None if no launch has claimed it, or all was removed since.

    Raises ObjectStoreError.
    """
    key = uri.key(_RUN_ID)
    try:
        text = bucket.get(key, RUN_ID_BYTES)[0].decode("ascii", "replace").strip()
    except ObjectMissingError:
        return None
    if is_run_id(text):
        return text
    raise ObjectStoreError(
        f"{bucket.uri(key)} holds no id of a run; restore it, or remove it: the run then gets a "
        "new one, and does not remove the checkpoints that it has saved"
    )


def _key(uri: ObjectUri, generation: int) -> str:
    return uri.key(f"{names.GENERATIONS}/{generation:08d}")


def _content_of(owner: Owner, beat: int, released: bool) -> bytes:
    return json.dumps(dataclasses.asdict(owner) | {"beat": beat, "released": released}).encode()
