"""A bundle: one archive of a sweep, to pass its results on. docs/rules.md describes the content.

It is a ZIP file, which any tool opens. Its SHA256SUMS has the checksum of every other file, in the format of
sha256sum(1). The comment of the archive, its last bytes, is the checksum of all bytes before it, since ZIP has fields
that readers ignore, and a change of any byte must be found.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from ...common.sweep_files import DRILL, DRILL_TRACE, LOG, PLANS, REPLAY, REQUEST, RESULT, SESSIONS, SWEEP, TRACE
from ..common.errors import CouldNotRunError
from .read import Sweep, is_sweep

CHECKSUMS, ABOUT = "SHA256SUMS", "bundle.json"
BUNDLE_FORMAT = 1
_SEAL = b"sha256 "
_DIGEST = 64  # hexadecimal digits
_BLOCK = 1 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest that ZIP knows: the same sweep gives the same archive


@contextmanager
def opened(path: Path) -> Iterator[Path]:
    """The directory of a sweep: `path` itself, or what the bundle `path` holds, for as long as the context lasts.

    Raises CouldNotRunError for a bundle that was altered, naming the file in it, and for what is neither.
    """
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="ckpt_analysis_bundle_") as place:
        extract(path, Path(place))
        yield Path(place)


def is_bundle(path: Path) -> bool:
    """Whether a file is an archive, altered or not: it begins as ZIP files do, or ends as a bundle does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        begin = file.read(4)
    return begin == b"PK\x03\x04" or path.suffix == ".zip"


def pack(sweep: Sweep, about: dict[str, Any], target: Path) -> int:
    """Write the bundle of a sweep to `target`, `about` as its bundle.json; how many files it holds. Raises OSError."""
    files = sorted(_files(sweep), key=str)
    header = {"format": BUNDLE_FORMAT, "sweep": sweep.name} | about
    content = (json.dumps(header, indent=1) + "\n").encode()
    sums = [(hashlib.sha256(content).hexdigest(), ABOUT)]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, ABOUT, content)
        for path in files:
            name = path.relative_to(sweep.directory).as_posix()
            data = path.read_bytes()
            sums.append((hashlib.sha256(data).hexdigest(), name))
            _add(archive, name, data)
        _add(archive, CHECKSUMS, "".join(f"{digest}  {name}\n" for digest, name in sums).encode())
        archive.comment = _SEAL + b"0" * _DIGEST
    _seal(target)
    return len(files) + 2


def extract(path: Path, place: Path) -> None:
    """Check a bundle and unpack it into the empty directory `place`. Raises CouldNotRunError, naming what is wrong."""
    try:
        sealed = _is_sealed(path)
        with zipfile.ZipFile(path) as archive:
            _extract(archive, path, place)
    except CouldNotRunError:  # a ValueError, too, which says all
        raise
    except OSError as exc:
        raise CouldNotRunError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError) as exc:
        raise CouldNotRunError(f"{path}: is no bundle, or an altered one: {exc}") from exc
    if not sealed:
        raise CouldNotRunError(
            f"{path}: the archive is altered, though every file in it is as it was: its directory or its checksum"
        )
    if not is_sweep(place):
        raise CouldNotRunError(f"{path}: holds no {SWEEP}; it is no bundle of a sweep")


def _files(sweep: Sweep) -> Iterator[Path]:
    root = sweep.directory
    yield from (root / name for name in (REQUEST, SWEEP))
    for folder in (PLANS, SESSIONS):
        yield from (root / folder).glob("*.json")
    for one in sweep.cells:
        for name in (RESULT, LOG, REPLAY, DRILL):
            if (one.directory / name).is_file():
                yield one.directory / name
        yield from one.directory.glob("run_*.sh")
        for folder in (TRACE, DRILL_TRACE):
            yield from (path for path in (one.directory / folder).glob("*") if path.is_file() and path.name[0] != ".")


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    archive.writestr(info, data)


def _seal(path: Path) -> None:
    with path.open("r+b") as file:
        digest = _digest_of_all_but_seal(file)
        file.seek(-_DIGEST, 2)
        file.write(digest)


def _is_sealed(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < _DIGEST + len(_SEAL):
            return False
        file.seek(-_DIGEST - len(_SEAL), 2)
        end = file.read()
        return end == _SEAL + _digest_of_all_but_seal(file)


def _digest_of_all_but_seal(file: IO[bytes]) -> bytes:
    left = file.seek(0, 2) - _DIGEST
    file.seek(0)
    found = hashlib.sha256()
    while left > 0:
        block = file.read(min(left, _BLOCK))
        found.update(block)
        left -= len(block)
    return found.hexdigest().encode()


def _extract(archive: zipfile.ZipFile, path: Path, place: Path) -> None:
    sums = _sums(archive, path)
    names = archive.namelist()
    for name in names:
        if name != CHECKSUMS and name not in sums:
            raise CouldNotRunError(f"{path}: {name} is in the archive, and not in its {CHECKSUMS}: it was added")
    if len(set(names)) < len(names):
        raise CouldNotRunError(f"{path}: a file is in the archive twice; it is altered")
    for name, digest in sums.items():
        if name not in names:
            raise CouldNotRunError(f"{path}: {name} is missing; the bundle is altered")
        inner = PurePosixPath(name)
        if inner.is_absolute() or ".." in inner.parts or "\\" in name or ":" in name:
            raise CouldNotRunError(f"{path}: {name!r} leads out of the bundle; it is not used")
        data = _read(archive, name, path)
        if hashlib.sha256(data).hexdigest() != digest:
            raise CouldNotRunError(f"{path}: {name} is altered: its checksum is not that of {CHECKSUMS}")
        target = place / inner
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def _sums(archive: zipfile.ZipFile, path: Path) -> dict[str, str]:
    if CHECKSUMS not in archive.namelist():
        raise CouldNotRunError(f"{path}: holds no {CHECKSUMS}; it is no bundle, or an altered one")
    text = _read(archive, CHECKSUMS, path).decode("utf-8")
    pairs = [line.partition("  ") for line in text.splitlines()]
    return {name: digest for digest, _, name in pairs}


def _read(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as exc:
        raise CouldNotRunError(f"{path}: {name} is altered: {exc}") from exc
