"""Errors of requests to an object store, in a module that imports neither the client nor checksums."""

from __future__ import annotations


class ObjectStoreError(RuntimeError):
    """The store refuses, or cannot be reached; the message names the object and what to do."""


class ObjectMissingError(ObjectStoreError):
    """There is no such object, or no such upload."""


class ObjectChangedError(ObjectStoreError):
    """The object is not, or is already, what the condition of a request says."""
