"""manifest.json: what it holds, and the checks that it passes before anything relies on it; no torch.

A checksum says that a manifest is as it was written, not that it was written by this program: so types, ranges and
names are checked one by one. A name that is absolute, has "..", or is empty would lead out of the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpointing.engines.base import FilePart, HeaderExtent, SavedFile
from megatron.checkpointing.store import naming as names
from restart_trace.regular import open_regular, read_regular
from restart_trace.strict_json import parse_json

MANIFEST_VERSION = 1
# Nobody commits as often; one that is forged must not keep others from being committed.
MAX_SEQUENCE = (1 << 63) - 1
_MAX_MANIFEST = 1 << 30  # bytes: some millions of files
_MAX_INTEGER = (1 << 63) - 1
_MAX_RANKS = 1 << 24  # in a layout: programs that read one loop over them
_LAYOUT = ("tp", "pp", "dp")
_HEADER_EXTENTS = 2  # of a rank's part of a shared file
_MAX_HEADER = 100_000_000  # bytes: what readers of safetensors take
# How a manifest begins and ends, as this program writes it. No text in it has a line break, so nothing else is so.
_HEADING_BYTES = 512
_BEGINNING_BYTES = 1 << 13  # holds what a manifest says of the model, which comes before the files
_FILES_FOLLOW = b',\n "files": {'
_HEAD = re.compile(rb'\{\n "tag": "([A-Za-z0-9_][A-Za-z0-9_.-]{0,254})",\n "step": ([0-9]{1,18}),\n')
_TAIL = re.compile(
    rb'\n "sequence": ([0-9]{1,19}),\n(?: "run_id": "([0-9a-f]{0,32})",\n)? "manifest_version": %d,\n'
    rb' "checksum": "(sha256:[0-9a-f]{64})"\n\}\n\Z' % MANIFEST_VERSION
)


@dataclass(frozen=True)
class StoredObject:
    """A file as an object in a store: its ETag, and the CRC-32 of its content ("crc32:...")."""

    etag: str
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json. `files` has every file of the checkpoint except the manifest itself.

    `sequence` counts the commits into a directory from 1: by it the newest checkpoint is the last committed one, even
    after training went back to an earlier step with --load-tag. `loaded_from` is the other directory that the run began
    from; "" if it began from its own or from none. `first_start`: the flags that it began with, as
    preflight/first_start.py has them, and `resumed_with` those of the last start that resumed the directory otherwise
    than from its newest checkpoint; "" if there were none. `run_id` is that of the directory that it was saved into
    (see ownership.py); "" if nobody owned that, or an earlier version wrote it. `objects`: for a checkpoint in object
    storage, the object of each file. `training`: optimizer and schedule (training_identity of
    preflight/compatibility.py); {} if an earlier version wrote it.
    A new key needs an entry in _MANIFEST, which says what values it may have.
    """

    tag: str
    step: int
    engine: str
    layout: dict[str, int]
    model: dict[str, Any]
    files: dict[str, SavedFile]
    loaded_from: str = ""
    first_start: str = ""
    resumed_with: str = ""
    sequence: int = 1
    run_id: str = ""
    manifest_version: int = MANIFEST_VERSION
    objects: dict[str, StoredObject] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """The content and, under "checksum", the SHA-256 of its canonical JSON."""
        content = asdict(self)
        for file in content["files"].values():
            if not file["parts"]:  # as below
                del file["parts"]
        training = content.pop("training")
        for key in ("objects", "first_start", "resumed_with"):
            if not content[key]:  # programs of before, which did not know it, read all others
                del content[key]
        if training:  # before the files, where `beginning_of` reads it
            files = list(content).index("files")
            entries = list(content.items())
            content = dict([*entries[:files], ("training", training), *entries[files:]])
        return json.dumps(content | {"checksum": content_checksum(content)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Raises ValueError if `text` is not a complete, unaltered manifest with values of the right types."""
        content = parse_manifest(text)
        content["files"] = {name: saved_file(entry) for name, entry in content["files"].items()}
        content["objects"] = {name: StoredObject(**entry) for name, entry in content.get("objects", {}).items()}
        return Manifest(**content)

    @staticmethod
    def of(directory: Path) -> Manifest:
        """The manifest in `directory`. Raises ValueError as `from_json`, and OSError if it cannot be read."""
        return Manifest.from_json(read_manifest_text(directory))

    @staticmethod
    def beginning_of(directory: Path) -> Manifest:
        """The manifest in `directory` without its files: tag, step, engine, layout, model and training.

        It takes a few calls and 8 KiB, whatever the manifest's length. These have no checksum of their own, so a
        flipped bit in them may go unnoticed. A manifest that does not begin as this program writes it is read and
        checked completely. Raises as `of`.
        """
        fd = open_regular(directory / names.MANIFEST)
        try:
            begin, found, _ = os.pread(fd, _BEGINNING_BYTES, 0).partition(_FILES_FOLLOW)
        finally:
            os.close(fd)
        try:
            content = parse_json(begin + b"\n}") if found else {}
            _check_object(content, {key: _MANIFEST[key] for key in _BEGINNING}, _OF_THE_MODEL)
        except ValueError:
            return Manifest.of(directory)
        return Manifest(**content, files={})


def saved_file(entry: dict[str, Any]) -> SavedFile:
    """A file as the JSON of a manifest tells of it."""
    parts = tuple(
        FilePart(
            part["rank"], tuple(HeaderExtent(*extent) for extent in part["header"]), tuple(part["data"]),
            tuple(part["states"]),
        )
        for part in entry.get("parts", ())
    )  # fmt: skip
    return SavedFile(**entry | {"states": tuple(entry.get("states", ())), "parts": parts})


def content_checksum(content: dict[str, Any]) -> str:
    """ "sha256:..." of the canonical JSON of a manifest without its checksum."""
    return "sha256:" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def parse_manifest(text: str) -> dict[str, Any]:
    """The content of a manifest without its checksum: every key is known and of the type that it must have.

    Raises ValueError, saying what is wrong, for everything else.
    """
    try:
        content = parse_json(text)
        if not isinstance(content, dict) or "checksum" not in content:
            raise ValueError("it has no checksum")
        if content.pop("checksum") != content_checksum(content):
            raise ValueError("its content does not have the checksum it was written with")
    except RecursionError:  # of the checksum, which needs more of the stack than reading it
        raise ValueError("it is nested too deeply") from None
    version = content.get("manifest_version")
    if type(version) is not int or version != MANIFEST_VERSION:
        raise ValueError(f"manifest version {_shown(version)}, and only {MANIFEST_VERSION} is known")
    _check_object(content, _MANIFEST, _REQUIRED)
    return content


def read_manifest_text(directory: Path) -> str:
    """The text of the manifest in `directory`. Raises OSError, of a FIFO or the like too, or ValueError."""
    return read_regular(directory / names.MANIFEST, _MAX_MANIFEST).decode()


class Heading(NamedTuple):
    """What the ends of a manifest say. `run_id`: of the run that saved it; "" if an earlier version wrote it."""

    tag: str
    step: int
    sequence: int
    run_id: str
    checksum: str

    @staticmethod
    def of(directory: Path) -> Heading:
        """The heading of the manifest in `directory`, by a few calls that do not find damage in the rest of it.

        A manifest that does not begin and end as this program writes it is read and checked completely. Raises as
        `Manifest.of`.
        """
        fd = open_regular(directory / names.MANIFEST)
        try:
            size = os.fstat(fd).st_size
            begin = _HEAD.match(os.pread(fd, _HEADING_BYTES, 0))
            end = _TAIL.search(os.pread(fd, _HEADING_BYTES, max(size - _HEADING_BYTES, 0)))
        finally:
            os.close(fd)
        if begin is None or end is None or int(end[1]) > MAX_SEQUENCE:
            manifest = Manifest.of(directory)
            checksum = json.loads(manifest.to_json())["checksum"]
            return Heading(manifest.tag, manifest.step, manifest.sequence, manifest.run_id, checksum)
        return Heading(begin[1].decode(), int(begin[2]), int(end[1]), (end[2] or b"").decode(), end[3].decode())


def _shown(value: Any) -> str:
    """A value for a message: quoted, and not all of it if it is long."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:80] + "..."


# Checks of one value: they raise ValueError that says what is wrong, and leave it to the caller to say where.
_Check = Callable[[Any], None]


def _integer(least: int, most: int = _MAX_INTEGER) -> _Check:
    def check(value: Any) -> None:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, and is {_shown(value)}")

    return check


def _text(value: Any) -> None:
    if type(value) is not str:
        raise ValueError(f"must be text, and is {_shown(value)}")


def _line(value: Any) -> None:
    """Text for messages and comparisons."""
    if type(value) is not str or not value or not value.isprintable():
        raise ValueError(f"must be printable text, and is {_shown(value)}")


def _line_or_nothing(value: Any) -> None:
    if value != "":
        _line(value)


def _tag(value: Any) -> None:
    _text(value)
    wrong = names.wrong_in_name(value)
    if wrong:
        raise ValueError(f"{_shown(value)} {wrong}")


def _path(value: Any) -> None:
    """A path within the checkpoint, "/" between its parts. An engine may give a file a name that begins with a dot."""
    _text(value)
    for part in value.split("/"):
        wrong = "leads out of the checkpoint" if part in (".", "..") else names.wrong_in_name(part.lstrip("."))
        if wrong:
            why = wrong if part else "is absolute or has an empty part"
            raise ValueError(f"the path {_shown(value)} {why}")


def _paths(value: Any) -> None:
    if type(value) is not list:
        raise ValueError(f"must be a list, and is {_shown(value)}")
    for item in value:
        _path(item)


def _layout(value: Any) -> None:
    sizes = dict.fromkeys((*_LAYOUT, "ep"), _integer(1, _MAX_RANKS))
    _check_object(value, sizes | {"zero": _integer(3, 3)}, _LAYOUT)
    if value["dp"] % value.get("ep", 1):
        raise ValueError(f"ep {value['ep']} does not divide dp {value['dp']}")
    if value["tp"] * value["pp"] * value["dp"] > _MAX_RANKS:
        raise ValueError(f"is of more than {_MAX_RANKS} ranks")


def _settings(value: Any) -> None:
    if type(value) is not dict:
        raise ValueError(f"must be an object, and is {_shown(value)}")
    for key, item in value.items():
        _line(key)
        if type(item) not in (str, int, float, bool, type(None)):
            raise ValueError(f"{key} must be one value, and is {_shown(item)}")
        if type(item) is str:
            _line_or_nothing(item)
        if type(item) is int:
            _integer(-_MAX_INTEGER)(item)


def _files(value: Any) -> None:
    if type(value) is not dict or not value:
        raise ValueError(f"must be an object that tells of files, and is {_shown(value)}")
    for name, entry in value.items():
        try:
            _check_object(entry, _FILE, ("name", "num_bytes", "checksum"))
            if entry["name"] != name:
                raise ValueError(f"calls itself {_shown(entry['name'])}")
            if name == names.MANIFEST:
                raise ValueError("is the manifest, which is none of the files that it lists")
        except ValueError as exc:
            raise ValueError(f"{_shown(name)}: {exc}") from None


def _parts(value: Any) -> None:
    if type(value) is not list or not value:
        raise ValueError(f"must be a list of what ranks have written, and is {_shown(value)}")
    for part in value:
        _check_object(part, _PART, tuple(_PART))


def _extent(value: Any) -> None:
    if type(value) is not list or len(value) != 2:
        raise ValueError(f"must be the first byte of an extent and the one after its last, and is {_shown(value)}")
    for position in value:
        _integer(0)(position)
    if value[1] < value[0]:
        raise ValueError(f"ends before it begins: {_shown(value)}")


def _header_extents(value: Any) -> None:
    if type(value) is not list or len(value) != _HEADER_EXTENTS:
        raise ValueError(f"must be {_HEADER_EXTENTS} extents with their checksums, and is {_shown(value)}")
    for item in value:
        if type(item) is not list or len(item) != 3 or not _is_crc32(item[2]):
            raise ValueError(f"must be an extent with its checksum, and is {_shown(item)}")
        _extent(item[:2])
        if item[1] - item[0] > _MAX_HEADER:
            raise ValueError(f"is longer than a header may be: {_shown(item)}")


def _is_crc32(value: Any) -> bool:
    return type(value) is str and re.fullmatch("[0-9a-f]{8}", value) is not None


def _objects(value: Any) -> None:
    if type(value) is not dict:
        raise ValueError(f"must be an object that tells of objects, and is {_shown(value)}")
    for name, entry in value.items():
        try:
            _check_object(entry, _OBJECT, tuple(_OBJECT))
        except ValueError as exc:
            raise ValueError(f"{_shown(name)}: {exc}") from None


def _check_object(value: Any, checks: dict[str, _Check], required: tuple[str, ...]) -> None:
    if type(value) is not dict:
        raise ValueError(f"must be an object, and is {_shown(value)}")
    for key in required:
        if key not in value:
            raise ValueError(f"{key} is missing")
    for key, item in value.items():
        if key not in checks:
            raise ValueError(f"{_shown(key)} is unknown")
        try:
            checks[key](item)
        except ValueError as exc:
            raise ValueError(f"{key}: {exc}") from None


_PART = {"rank": _integer(0, _MAX_RANKS), "header": _header_extents, "data": _extent, "states": _paths}
_FILE = {"name": _path, "num_bytes": _integer(0), "checksum": _line_or_nothing, "states": _paths, "parts": _parts}
_OBJECT = {"etag": _line, "checksum": _line}
_MANIFEST = {
    "tag": _tag,
    "step": _integer(0),
    "engine": _line,
    "layout": _layout,
    "model": _settings,
    "training": _settings,
    "files": _files,
    "run_id": _text,
    "loaded_from": _text,
    "first_start": _line,
    "resumed_with": _line,
    "sequence": _integer(0, MAX_SEQUENCE),
    "manifest_version": _integer(0),
    "objects": _objects,
}
_OF_THE_MODEL = ("tag", "step", "engine", "layout", "model")
_BEGINNING = (*_OF_THE_MODEL, "training")
_REQUIRED = (*_OF_THE_MODEL, "files")
