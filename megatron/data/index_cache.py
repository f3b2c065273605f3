"""Index arrays on disk, built once by one process and mapped by all.

An entry is named by the MD5 of a text that describes everything its arrays depend on: ``HASH_NAME.npy`` for
each array, and ``HASH.dsc`` with that text and a checksum of each file. Files are written under temporary
names and renamed, the ``.dsc`` last: an entry without it is not there.
"""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
# Checksums cover this many bytes at the start and the end of a file, so that checking a large index stays cheap.
_CHECKED_BYTES = 4 << 20


class IndexCacheError(ValueError):
    """An index could not be written to, or read from, the cache directory."""


@dataclass(frozen=True)
class ArraySpec:
    """Data type and shape that a cached array must have."""

    dtype: npt.DTypeLike
    shape: tuple[int, ...]

    def fits(self, candidate: Array) -> bool:
        return candidate.dtype == np.dtype(self.dtype) and candidate.shape == self.shape


@dataclass(frozen=True)
class IndexCache:
    """Directories that are searched in order; new entries go to the last one."""

    directories: tuple[Path, ...]

    @classmethod
    def beside(cls, data_prefix: str, data_cache_path: str | None) -> IndexCache:
        """``index-cache`` beside the data, then --data-cache-path where it is given."""
        directories = [Path(data_prefix).parent / "index-cache"]
        if data_cache_path is not None:
            directories.append(Path(data_cache_path))
        return cls(tuple(directories))

    def ensure(
        self, description: str, specs: Mapping[str, ArraySpec], build: Callable[[], Mapping[str, Array]]
    ) -> None:
        """Build and store the entry unless a valid one (form and checksums) exists.

        A damaged entry is taken away first, so that no process reads it.
        Raises IndexCacheError naming --data-cache-path when the directory cannot be written.
        """
        for directory in self.directories:
            if _verified(directory, description, specs):
                return
            damaged = directory / f"{_key(description)}.dsc"
            try:
                if damaged.is_file():
                    damaged.unlink()
            except OSError as error:
                raise IndexCacheError(
                    f"the sample index {damaged} is damaged and cannot be removed: {error}: delete it"
                ) from error
        self.store(description, build())

    def store(self, description: str, arrays: Mapping[str, Array]) -> None:
        """Write an entry to the last directory. Raises IndexCacheError naming --data-cache-path."""
        directory = self.directories[-1]
        key = _key(description)
        lines = [description]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name, values in arrays.items():
                path = directory / f"{key}_{name}.npy"
                _write_atomically(path, lambda file, values=values: np.save(file, values, allow_pickle=False))
                lines.append(_checksum_line(name, path))
            text = "\n".join(lines) + "\n"
            _write_atomically(directory / f"{key}.dsc", lambda file: file.write(text.encode("utf-8")))
        except OSError as error:
            raise IndexCacheError(
                f"cannot write the sample index to {directory}: {error}: "
                "set --data-cache-path to a directory that can be written and that all nodes share"
            ) from error

    def load(self, description: str, specs: Mapping[str, ArraySpec], wait_s: float = 10.0) -> dict[str, Array]:
        """Map the arrays of an entry (read-only).

        Waits up to ``wait_s`` seconds for the files: on a network file system what one node wrote may appear
        on another a little later. Raises IndexCacheError when they do not appear or have another form.
        """
        deadline = time.monotonic() + wait_s
        while True:
            for directory in self.directories:
                arrays = _map_entry(directory, description, specs)
                if arrays is not None:
                    return arrays
            if time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        places = ", ".join(str(directory / f"{_key(description)}*") for directory in self.directories)
        raise IndexCacheError(
            f"the sample index is missing or damaged: {places}: the process that builds it must see the same "
            "directory: set --data-cache-path to one that all nodes share"
        )


def _key(description: str) -> str:
    return hashlib.md5(description.encode("utf-8"), usedforsecurity=False).hexdigest()


def _map_entry(directory: Path, description: str, specs: Mapping[str, ArraySpec]) -> dict[str, Array] | None:
    key = _key(description)
    if not (directory / f"{key}.dsc").is_file():
        return None
    arrays: dict[str, Array] = {}
    for name, spec in specs.items():
        try:
            candidate = np.load(directory / f"{key}_{name}.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None  # missing or truncated: the caller builds it anew or reports it
        if not spec.fits(candidate):
            return None
        arrays[name] = candidate.view(np.ndarray)  # plain views are several times faster to index than np.memmap
    return arrays


def _verified(directory: Path, description: str, specs: Mapping[str, ArraySpec]) -> bool:
    if _map_entry(directory, description, specs) is None:
        return False
    key = _key(description)
    try:
        recorded = set((directory / f"{key}.dsc").read_text(encoding="utf-8").splitlines())
        return all(_checksum_line(name, directory / f"{key}_{name}.npy") in recorded for name in specs)
    except (OSError, UnicodeDecodeError):
        return False


def _checksum_line(name: str, path: Path) -> str:
    with open(path, "rb") as file:
        checksum = zlib.crc32(file.read(_CHECKED_BYTES))
        size = file.seek(0, os.SEEK_END)
        file.seek(max(_CHECKED_BYTES, size - _CHECKED_BYTES))
        checksum = zlib.crc32(file.read(), checksum)
    return f"{name}: {size} bytes, crc32 {checksum:08x}"


def _write_atomically(path: Path, write: Callable[[Any], object]) -> None:
    temporary = path.with_name(f"{path.name}.tmp-{os.uname().nodename}-{os.getpid()}")
    temporary.unlink(missing_ok=True)  # a killed process of this number may have left one, and a link is not followed
    try:
        with open(temporary, "xb") as file:
            write(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
