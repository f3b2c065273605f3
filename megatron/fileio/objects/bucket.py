"""The client of a bucket, by the scheme of its URI: the one module that knows which clients there are."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from megatron.fileio.objects.s3 import Bucket, ObjectInfo, SentPart, Traffic, Uploaded

__all__ = ["CLIENTS", "Bucket", "ObjectInfo", "SentPart", "Traffic", "Uploaded", "open_bucket", "preload_clients"]

CLIENTS = {"s3": Bucket}  # scheme -> client; stores.py has the same schemes


@functools.cache
def open_bucket(scheme: str, name: str, deadline_s: float = 120.0) -> Bucket:
    """The client of the bucket `name`, one for all calls: making one takes a while.

    `deadline_s`: how long a request may take with all its retries. Raises ObjectStoreError if its library is missing.
    """
    return CLIENTS[scheme](name, deadline_s=deadline_s)


def preload_clients(arguments: Iterable[str]) -> None:
    """As `Bucket.preload`, of each client that a URI among the words `arguments` names."""
    words = list(arguments)
    for scheme, client in CLIENTS.items():
        if any(f"{scheme}://" in word for word in words):
            client.preload()
