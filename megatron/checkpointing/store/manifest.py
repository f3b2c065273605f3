"""What manifest.json and `latest` may say. They are checked here, once, before anybody relies on them; no torch.

A checksum says that a manifest is as it was written, not that it was written by this program: so types, ranges and
names are checked one by one. A name that is absolute, has "..", or is empty would lead out of the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpointing.store import naming as names
from restart_trace.regular import open_regular, read_regular
from restart_trace.strict_json import parse_json

MANIFEST_VERSION = 1
# Nobody commits as often; one that is forged must not keep others from being committed.
MAX_SEQUENCE = (1 << 63) - 1

_MAX_MANIFEST = 1 << 30  # bytes: some millions of files
_MAX_NAME = 255  # bytes in the name of a file or directory (NAME_MAX)
_MAX_INTEGER = (1 << 63) - 1
_MAX_RANKS = 1 << 24  # in a layout: whoever reads one counts through them
_LAYOUT = ("tp", "pp", "dp")
# How a manifest begins and ends, as this program writes it. No text in it has a line break, so nothing else is so.
_HEADING_BYTES = 512
_BEGINNING_BYTES = 1 << 13  # holds what a manifest says of the model, which comes before the files
_FILES_FOLLOW = b',\n "files": {'
_HEAD = re.compile(rb'\{\n "tag": "([A-Za-z0-9_][A-Za-z0-9_.-]{0,254})",\n "step": ([0-9]{1,18}),\n')
_TAIL = re.compile(
    rb'\n "sequence": ([0-9]{1,19}),\n(?: "run_id": "([0-9a-f]{0,32})",\n)? "manifest_version": %d,\n'
    rb' "checksum": "sha256:[0-9a-f]{64}"\n\}\n\Z' % MANIFEST_VERSION
)


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


def read_heading(directory: Path) -> Heading | None:
    """The heading of the manifest in `directory`, of which only the ends are read: a few calls.

    None if it does not look as this program writes it. Whether it is whole and unaltered is not looked at. Raises
    OSError, of a FIFO or the like too.
    """
    fd = open_regular(directory / names.MANIFEST)
    try:
        size = os.fstat(fd).st_size
        begin = _HEAD.match(os.pread(fd, _HEADING_BYTES, 0))
        end = _TAIL.search(os.pread(fd, _HEADING_BYTES, max(size - _HEADING_BYTES, 0)))
    finally:
        os.close(fd)
    if begin is None or end is None or int(end[1]) > MAX_SEQUENCE:
        return None
    return Heading(begin[1].decode(), int(begin[2]), int(end[1]), (end[2] or b"").decode())


def read_beginning(directory: Path) -> dict[str, Any] | None:
    """What the manifest in `directory` says before it tells of files: tag, step, engine, layout, model and training.

    None if it does not begin as this program writes it. Of a manifest of any length a few calls and 8 KiB: there is no
    checksum of these alone, so a flipped bit in them may go unnoticed. Raises OSError, of a FIFO or the like too.
    """
    fd = open_regular(directory / names.MANIFEST)
    try:
        begin, found, _ = os.pread(fd, _BEGINNING_BYTES, 0).partition(_FILES_FOLLOW)
    finally:
        os.close(fd)
    try:
        content = parse_json(begin + b"\n}") if found else None
        _check_object(content, {key: _MANIFEST[key] for key in _BEGINNING}, _OF_THE_MODEL)
    except ValueError:
        return None
    return content


def read_latest(directory: Path, pointer: str = names.LATEST) -> str | None:
    """The tag that the file `pointer` in `directory` names; None without such a file. The tag need not be there.

    Raises ValueError naming the file and saying why it names none.
    """
    path = directory / pointer
    try:
        content = read_regular(path, 2 * _MAX_NAME)
        tag = content.decode().strip()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: names no checkpoint: it is not text") from None
    except (OSError, ValueError) as exc:
        raise ValueError(f"{path}: names no checkpoint: {str(exc).removeprefix(f'{path}: ')}") from None
    wrong = _wrong_in_name(tag)
    if wrong:
        raise ValueError(f"{path}: names no checkpoint: {_shown(tag)} {wrong}")
    return tag


def _shown(value: Any) -> str:
    """A value for a message: quoted, and not all of it if it is long."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _wrong_in_name(name: str) -> str | None:
    """What keeps `name` from being the name of a file or directory that a load looks at."""
    if not name:
        return "is empty"
    if name.startswith("."):
        return "begins with a dot"
    if "/" in name:
        return "is not one name, but a path"
    if not name.isprintable():
        return "has characters that cannot be printed"
    if len(name.encode()) > _MAX_NAME:
        return f"is longer than a file name can be ({_MAX_NAME} bytes)"
    return None


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
    wrong = _wrong_in_name(value)
    if wrong:
        raise ValueError(f"{_shown(value)} {wrong}")


def _path(value: Any) -> None:
    """A path within the checkpoint, "/" between its parts. An engine may give a file a name that begins with a dot."""
    _text(value)
    for part in value.split("/"):
        wrong = "leads out of the checkpoint" if part in (".", "..") else _wrong_in_name(part.lstrip("."))
        if wrong:
            why = wrong if part else "is absolute or has an empty part"
            raise ValueError(f"the path {_shown(value)} {why}")


def _paths(value: Any) -> None:
    if type(value) is not list:
        raise ValueError(f"must be a list, and is {_shown(value)}")
    for item in value:
        _path(item)


def _layout(value: Any) -> None:
    _check_object(value, dict.fromkeys(_LAYOUT, _integer(1, _MAX_RANKS)), _LAYOUT)
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


_FILE = {"name": _path, "num_bytes": _integer(0), "checksum": _line_or_nothing, "states": _paths}
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


def leads_out(directory: Path, name: str) -> bool:
    """Whether a link on the way from `directory` to `name` in it leads out of `directory`."""
    parts = [part for part in name.split("/") if part]
    ways = [os.path.join(directory, *parts[: i + 1]) for i in range(len(parts))]
    if not any(os.path.islink(way) for way in ways):
        return False
    return not os.path.realpath(ways[-1]).startswith(os.path.realpath(directory) + os.sep)
