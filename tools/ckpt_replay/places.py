"""The place of a replay's checkpoints, a directory or a prefix of a bucket: whether it can be used, and its removal."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.uris import Location, ObjectUri
from megatron.fileio.store_errors import ObjectStoreError

if TYPE_CHECKING:
    from megatron.fileio.object_store import Bucket


@functools.cache
def _bucket(name: str) -> Bucket:
    # Only here: what it needs is not there where the tools alone are installed.
    from megatron.fileio.object_store import Bucket

    return Bucket(name)


def check_writable(uri: ObjectUri) -> None:
    """Raises ObjectStoreError if nothing can be written below the prefix, naming what to change."""
    bucket, key = _bucket(uri.bucket), uri.key(".ckpt_replay")
    bucket.check_reachable(uri.key(""))
    bucket.put(key, b"")
    bucket.delete([key])


def problem_of(uri: ObjectUri) -> str | None:
    """Why nothing can be written below the prefix, and what to change; None if it can."""
    try:
        check_writable(uri)
    except ObjectStoreError as exc:
        return str(exc)
    return None


def remove(place: Location) -> None:
    """All that is there. What of a bucket cannot be removed stays: the figures are what was asked for."""
    if isinstance(place, Path):
        shutil.rmtree(place, ignore_errors=True)
        return
    try:
        bucket, prefix = _bucket(place.bucket), place.key("")
        bucket.delete([info.key for info in bucket.list(prefix)])
        for key, upload in bucket.unfinished_uploads(prefix):
            bucket.abort_upload(key, upload)
    except ObjectStoreError:
        return


def store_in_words() -> str:
    """Which object storage; a bucket's is no file system."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return f"object storage at {endpoint}" if endpoint else "Amazon S3"
