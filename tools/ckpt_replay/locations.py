"""The location of a replay's checkpoints, a directory or a prefix of a bucket: check it, remove it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.uris import Location, ObjectUri
from megatron.fileio.objects.errors import ObjectStoreError

if TYPE_CHECKING:
    from megatron.fileio.objects.bucket import Bucket


def _bucket_of(uri: ObjectUri) -> Bucket:
    # Imported here: its dependencies are missing where only the tools are installed.
    from megatron.fileio.objects.bucket import open_bucket

    return open_bucket(uri.scheme, uri.bucket)


def check_writable(uri: ObjectUri) -> None:
    """Raises ObjectStoreError if the prefix cannot be written, naming what to change."""
    bucket, key = _bucket_of(uri), uri.key(".ckpt_replay")
    bucket.check_reachable(uri.key(""))
    bucket.put(key, b"")
    bucket.delete([key])


def problem_of(uri: ObjectUri) -> str | None:
    """Why the prefix cannot be written, and what to change; None if it can."""
    try:
        check_writable(uri)
    except ObjectStoreError as exc:
        return str(exc)
    return None


def remove(location: Location) -> None:
    """Remove everything there. Errors of a bucket are ignored: the figures are what the user asked for."""
    if isinstance(location, Path):
        shutil.rmtree(location, ignore_errors=True)
        return
    try:
        bucket, prefix = _bucket_of(location), location.key("")
        bucket.delete([info.key for info in bucket.list(prefix)])
        for key, upload in bucket.unfinished_uploads(prefix):
            bucket.abort_upload(key, upload)
    except ObjectStoreError:
        return
