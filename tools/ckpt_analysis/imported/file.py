"""`imported.json`: the one file of an imported run's directory. docs/log_format.md describes it."""

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
from ..model.imported_run import (
    ImportedIteration,
    ImportedLoad,
    ImportedRun,
    ImportedSave,
    Launched,
    Listing,
    Printed,
    Range,
)

FORMAT, VERSION = "ckpt_analysis_import", 1


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
            raise CouldNotRunError(
                f"-o {directory}: holds an imported run already: give another directory or --force"
            )
        partial.write_text(
            json.dumps({"format": FORMAT, "version": VERSION} | asdict(run), indent=1) + "\n",
            encoding="utf-8",
        )
        partial.replace(target)
    except OSError as exc:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise CouldNotRunError(
            f"-o {directory}: cannot be written: {exc.strerror}. Give another directory"
        ) from exc
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
    try:
        run = _decode(data)
        check_types(run)
        return run
    except (KeyError, TypeError, AttributeError, ValueError) as exc:
        raise LogDirectoryError(f"{path}: is damaged ({exc}): {again}") from None


def _decode(data: dict[str, Any]) -> ImportedRun:
    fields = {name: value for name, value in data.items() if name not in ("format", "version")}
    listing = fields.pop("listing")
    return ImportedRun(
        launched=Launched(**fields.pop("launched")),
        saves=[_save(entry) for entry in fields.pop("saves")],
        loads=[ImportedLoad(**(entry | {"call": _range(entry["call"])})) for entry in fields.pop("loads")],
        iterations=[ImportedIteration(**entry) for entry in fields.pop("iterations")],
        setup={name: Range(**entry) for name, entry in fields.pop("setup").items()},
        listing=None if listing is None else Listing(**listing),
        **fields,
    )


def _save(entry: dict[str, Any]) -> ImportedSave:
    nested: dict[str, Any] = {name: _range(entry[name]) for name in ("call", "wait", "drain")}
    nested["printed"] = None if entry["printed"] is None else Printed(**entry["printed"])
    return ImportedSave(**(entry | nested))


def _range(entry: dict[str, Any] | None) -> Range | None:
    return None if entry is None else Range(**entry)


def check_types(value: Any, expected: Any = None, name: str = "") -> None:
    """Raises ValueError for a field, of a dataclass or below, that has not the type of its annotation.

    Numbers must be finite, fit into 64 bits and not be negative, which losses alone may be.
    """
    expected = expected or type(value)
    origin, parts = get_origin(expected), get_args(expected)
    if origin is types.UnionType:
        if value is not None:
            check_types(value, next(part for part in parts if part is not type(None)), name)
    elif dataclasses.is_dataclass(expected) and isinstance(value, cast(type, expected)):
        for field, hint in get_type_hints(expected).items():
            check_types(getattr(value, field), hint, field)
    elif origin is list and isinstance(value, list):
        for item in value:
            check_types(item, parts[0], name)
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            check_types(key, parts[0], name)
            check_types(item, parts[1], name)
    elif not _is_a(value, expected, name):
        raise ValueError(f"field {name} is not {getattr(origin or expected, '__name__', expected)}: {value!r:.60}")


def _is_a(value: Any, expected: Any, name: str) -> bool:
    if isinstance(value, bool) or expected not in (int, float):
        return expected in (bool, str) and isinstance(value, expected)
    return isinstance(value, (int, expected)) and (0 if name != "loss" else -1 << 63) <= value < 1 << 63
