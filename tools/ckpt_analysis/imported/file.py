"""`imported.json`: the one file of an imported run's directory, with the fields of model/imported_run.py."""

from __future__ import annotations

import dataclasses
import json
import os
import types
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from restart_trace.regular import read_regular

from ..common.errors import CouldNotRunError
from ..ingest.discover import IMPORTED_FILE, LogDirectoryError
from ..model.imported_run import ImportedRun

FORMAT, VERSION = "ckpt_analysis_import", 3


def write_run(run: ImportedRun, directory: Path, *, force: bool = False) -> Path:
    """Write `run` into `directory`, made if missing; returns the file.

    Raises CouldNotRunError if the directory is in use for something else, or cannot be written. An earlier import
    is replaced only with `force`.
    """
    target = directory / IMPORTED_FILE
    partial = target.with_suffix(".json.tmp")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        others = sorted(name for name in os.listdir(directory) if name.endswith(".jsonl"))
        if others:
            raise CouldNotRunError(
                f"-o {directory}: holds the trace of a run ({others[0]}, ...): give another directory"
            )
        if target.exists() and not force:
            raise CouldNotRunError(f"-o {directory}: holds an imported run already: give another directory or --force")
        partial.unlink(missing_ok=True)  # a link there would be written through
        partial.write_text(
            json.dumps({"format": FORMAT, "version": VERSION} | asdict(run), indent=1) + "\n", encoding="utf-8"
        )
        partial.replace(target)
    except OSError as exc:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise CouldNotRunError(f"-o {directory}: cannot be written: {exc.strerror}. Give another directory") from exc
    return target


def is_imported(directory: Path) -> bool:
    """Whether `directory` holds an imported run; one that may not be searched does not."""
    return os.path.isfile(directory / IMPORTED_FILE)


def read_run(directory: Path) -> ImportedRun:
    """The run in `directory`. Raises LogDirectoryError if its file is damaged or of another version."""
    path = directory / IMPORTED_FILE
    again = "import the log again"
    try:
        data = json.loads(read_regular(path))
    except OSError as exc:
        raise LogDirectoryError(f"{path}: cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError):
        raise LogDirectoryError(f"{path}: is damaged (not JSON): {again}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise LogDirectoryError(f"{path}: is not the file of an imported run: {again}")
    if data.get("version") != VERSION:
        raise LogDirectoryError(
            f"{path}: has version {data.get('version')}; this tool reads version {VERSION}: {again}"
        )
    fields = {name: value for name, value in data.items() if name not in ("format", "version")}
    try:
        return _decoded(fields, ImportedRun)
    except ValueError as exc:
        raise LogDirectoryError(f"{path}: is damaged ({exc}): {again}") from None


def _decoded(value: Any, expected: Any, name: str = "") -> Any:
    """What `asdict` and JSON made of an object of the type `expected`.

    Numbers must be finite, fit into 64 bits and not be negative, which losses alone may be. Raises ValueError for a
    field that is missing, unknown or not of the type of its annotation.
    """
    origin, parts = get_origin(expected), get_args(expected)
    if origin is types.UnionType:
        known = next(part for part in parts if part is not type(None))
        return None if value is None else _decoded(value, known, name)
    if dataclasses.is_dataclass(expected) and isinstance(value, dict):
        fields = {field.name: field for field in dataclasses.fields(expected)}
        hints = get_type_hints(expected)
        for field in fields.values():
            if field.name not in value and field.default is field.default_factory is dataclasses.MISSING:
                raise ValueError(f"field {field.name} is missing")
        if unknown := sorted(value.keys() - fields.keys()):
            raise ValueError(f"unknown field {unknown[0]}")
        return cast(type, expected)(**{key: _decoded(item, hints[key], key) for key, item in value.items()})
    if origin is list and isinstance(value, list):
        return [_decoded(item, parts[0], name) for item in value]
    if origin is dict and isinstance(value, dict):
        return {_decoded(key, parts[0], name): _decoded(item, parts[1], name) for key, item in value.items()}
    if not _is_a(value, expected, name):
        raise ValueError(f"field {name} is not {getattr(origin or expected, '__name__', expected)}: {value!r:.60}")
    return value


def _is_a(value: Any, expected: Any, name: str) -> bool:
    if isinstance(value, bool) or expected not in (int, float):
        return expected in (bool, str) and isinstance(value, expected)
    return isinstance(value, (int, expected)) and (0 if name != "loss" else -1 << 63) <= value < 1 << 63
