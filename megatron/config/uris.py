"""--save and --load as URIs, which name checkpoints in a bucket of an object store: SCHEME://BUCKET/PREFIX."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from megatron.config.errors import refuse
from megatron.fileio.objects.stores import STORES, URI_FORM, ObjectStore

__all__ = [
    "URI_FORM", "Location", "ObjectStore", "ObjectUri", "below", "is_uri", "location_of", "parse_uri",
]  # fmt: skip

_BUCKET = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,62}")
# A key may be of any characters; these need no quoting in a URL, in a log, or on a command line.
_PREFIX = re.compile(r"[A-Za-z0-9!_.*'()=+@,-]+(/[A-Za-z0-9!_.*'()=+@,-]+)*")
_FIX = f"give {URI_FORM}"
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/(?!/)")


@dataclass(frozen=True)
class ObjectUri:
    """A prefix of keys in a bucket, without a slash at its end."""

    bucket: str
    prefix: str
    scheme: str = next(iter(STORES))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"

    @property
    def store(self) -> ObjectStore:
        return STORES[self.scheme]

    def key(self, name: str) -> str:
        """The key of what is called `name` below the prefix."""
        return f"{self.prefix}/{name}"


Location: TypeAlias = Path | ObjectUri  # where checkpoints are


def below(place: Location, name: str) -> Location:
    """What is called `name` in a directory, or below a prefix."""
    return place / name if isinstance(place, Path) else replace(place, prefix=place.key(name))


def location_of(flag: str, text: str) -> Location:
    """The directory or the prefix that `text` names. Raises ConfigError naming `flag`, as parse_uri.

    Nor is a URI with one slash taken for a directory, unless it is written as ./s3:/...
    """
    if _ONE_SLASH.match(text):
        refuse(flag, text, f"a URI has two slashes: {_FIX}, or ./{text} for a directory of that name")
    return parse_uri(flag, text) if is_uri(text) else Path(text)


def is_uri(text: str | None) -> bool:
    """Whether a --save or --load is a URI, and no path."""
    return text is not None and "://" in text


def parse_uri(flag: str, text: str) -> ObjectUri:
    """Raises ConfigError naming `flag` for a URI that names no prefix of a bucket."""
    scheme, _, rest = text.partition("://")
    if scheme not in STORES:
        refuse(flag, text, f"{scheme}:// is not supported; {_FIX}, or a directory")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    if not _BUCKET.fullmatch(bucket):
        refuse(flag, text, f"{bucket!r} is no name of a bucket; {_FIX}")
    if not prefix:
        refuse(flag, text, f"names no prefix: a bucket is not a run's alone; {_FIX}")
    if not _PREFIX.fullmatch(prefix) or any(part in (".", "..") for part in prefix.split("/")):
        refuse(flag, text, f"the prefix has parts that are empty, '.' or '..', or characters to avoid in keys; {_FIX}")
    return ObjectUri(bucket, prefix, scheme)
