"""The place of a replay's checkpoints, a directory or a prefix of a bucket: whether it can be used, and its removal."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.uris import ObjectUri, Place
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


def remove(place: Place) -> None:
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
