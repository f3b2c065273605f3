"""Reads a sweep from its directory."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.sweep_files import (
    CELLS,
    DRILL_TRACE,
    FAILED,
    FORMAT,
    OK,
    PLANS,
    RESULT,
    SESSIONS,
    STORAGE,
    SWEEP,
    TRACE,
    Cell,
    cell_of,
)
from ..common.errors import CouldNotRunError

_WORD = re.compile(r"[\w.+@:-]*", re.ASCII)
_TRACES = (None, TRACE, DRILL_TRACE)


@dataclass(frozen=True)
class CellResult:
    """A cell and what came of it; `result` is result.json, None if the cell has not ended."""

    cell: Cell
    directory: Path
    result: dict[str, Any] | None

    @property
    def ok(self) -> bool:
        return self.result is not None and self.result["status"] == OK

    @property
    def trace_dir(self) -> Path | None:
        """Where its trace is; None if it leaves none."""
        return None if self.result is None or not self.result["trace"] else self.directory / self.result["trace"]


@dataclass(frozen=True)
class Sweep:
    """`plans`: name of a plan -> what ckpt-plan said; `sessions`: facts of machine and software, one for each start."""

    directory: Path
    name: str
    about: str
    repeats: int
    cells: list[CellResult]
    plans: dict[str, dict[str, Any]]
    sessions: list[dict[str, Any]]

    @property
    def measured(self) -> list[CellResult]:
        """Cells that ended well, but for those of the storage itself."""
        return [one for one in self.cells if one.ok and one.cell.mode != STORAGE]

    def plan_of(self, cell: Cell) -> dict[str, Any] | None:
        """The plan of its checkpoint; None if there is none."""
        plan = self.plans.get(cell.plan_name)
        return None if plan is None or "error" in plan else plan


def is_sweep(directory: Path) -> bool:
    """Whether a sweep has left its file there."""
    return (directory / SWEEP).is_file()


def read_sweep(directory: Path) -> Sweep:
    """Raises CouldNotRunError, naming the file, if it is no sweep or a file of it cannot be read."""
    if not is_sweep(directory):
        raise CouldNotRunError(f"{directory}: holds no {SWEEP}; give the --out of a sweep")
    content = read_json(directory / SWEEP)
    if content.get("format") != FORMAT:
        raise CouldNotRunError(f"{directory / SWEEP}: is of format {content.get('format')}, not {FORMAT}")
    try:
        cells = [_cell(directory, entry) for entry in content["cells"]]
        return Sweep(
            directory=directory,
            name=content["name"],
            about=content["about"],
            repeats=content["repeats"],
            cells=cells,
            plans={path.stem: read_json(path) for path in sorted((directory / PLANS).glob("*.json"))},
            sessions=[_session(path) for path in sorted((directory / SESSIONS).glob("*.json"))],
        )
    except (KeyError, TypeError) as exc:
        raise CouldNotRunError(f"{directory / SWEEP}: is not as a sweep writes it: {exc!r}") from exc


def _cell(directory: Path, entry: dict[str, Any]) -> CellResult:
    """Raises CouldNotRunError for names that no sweep gives: they would name files, and be shown in a terminal."""
    cell = cell_of(entry)
    words = (cell.mode, cell.model, cell.engine, cell.cache, cell.fault)
    if not all(isinstance(word, str) and _WORD.fullmatch(word) for word in words):
        raise CouldNotRunError(f"{directory / SWEEP}: cell {cell.index} is not as a sweep writes it")
    path = directory / CELLS / cell.name
    result = read_json(path / RESULT) if (path / RESULT).is_file() else None
    if result is not None and (result["trace"] not in _TRACES or result["status"] not in (OK, FAILED)):
        raise CouldNotRunError(f"{path / RESULT}: is not as a sweep writes it")
    return CellResult(cell, path, result)


def _session(path: Path) -> dict[str, Any]:
    """Raises CouldNotRunError if it does not say what others rely on."""
    content = read_json(path)
    machine, versions = content.get("machine"), content.get("versions")
    if (
        not isinstance(machine, dict)
        or not isinstance(versions, dict)
        or not {"processors", "memory_bytes", "kernel"} <= machine.keys()
        or not {"filesystem", "program"} <= content.keys()
    ):
        raise CouldNotRunError(f"{path}: does not say on what machine the sweep ran, and with what")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file. Raises CouldNotRunError naming it."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as exc:
        raise CouldNotRunError(f"{path}: cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise CouldNotRunError(f"{path}: is not JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise CouldNotRunError(f"{path}: holds no JSON object")
    return content
