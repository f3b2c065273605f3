"""The directory of a sweep: begun once, resumed as often as needed, and never written by two at a time.

Nothing in it is overwritten: a cell is done when its result.json is there, which is written last and as a whole. A cell
without one was interrupted; it is moved aside and measured again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.config.uris import Location, location_of
from restart_trace.process import versions
from restart_trace.schema import READABLE_VERSIONS, SCHEMA_VERSION
from restart_trace.version import __version__

from ..common.machine import filesystem_of, machine
from ..common.sweep_files import ASIDE, CELLS, FAILED, FORMAT, PLANS, REQUEST, RESULT, SESSIONS, SWEEP, Cell, write_json
from .sweep_file import Sweep

_LOCK = ".lock"


class SweepError(Exception):
    """The sweep cannot be run; the message names directory or file, and what to do."""


class SweepDirectory:
    """`id` marks the processes of the sweep and its directory on the storage."""

    def __init__(self, out: Path, sweep_id: str) -> None:
        self.out = out
        self.id = sweep_id

    def cell(self, cell: Cell) -> Path:
        return self.out / CELLS / cell.name

    def result(self, cell: Cell) -> dict[str, Any] | None:
        """What came of a cell; None if it has not ended."""
        path = self.cell(cell) / RESULT
        return _read(path) if path.is_file() else None

    def failed(self, cells: list[Cell]) -> list[Cell]:
        """Those that have ended without a measurement."""
        return [cell for cell in cells if (self.result(cell) or {}).get("status") == FAILED]

    def begin_cell(self, cell: Cell) -> Path:
        """The new directory of a cell; what an interrupted one left is moved aside."""
        path = self.cell(cell)
        if path.exists():
            self._move_aside(path)
        path.mkdir(parents=True)
        return path

    def end_cell(self, cell: Cell, result: dict[str, Any]) -> None:
        write_json(self.cell(cell) / RESULT, result)

    def move_failures_aside(self, cells: list[Cell]) -> int:
        """So that they are measured again; how many there were."""
        failed = self.failed(cells)
        for cell in failed:
            self._move_aside(self.cell(cell))
        return len(failed)

    def note_session(self, storage: Location) -> None:
        """Record this start of the sweep: when, on what, with what."""
        sessions = self.out / SESSIONS
        sessions.mkdir(exist_ok=True)
        number = len(list(sessions.glob("*.json"))) + 1
        write_json(sessions / f"{number:03d}.json", environment_facts(storage))

    def _move_aside(self, path: Path) -> None:
        aside = self.out / ASIDE
        aside.mkdir(exist_ok=True)
        number = 1
        while (aside / f"{path.name}.{number}").exists():
            number += 1
        os.rename(path, aside / f"{path.name}.{number}")


@contextlib.contextmanager
def opened(out: Path, sweep: Sweep, cells: list[Cell], storage: Location | None) -> Iterator[SweepDirectory]:
    """The directory of a sweep, new or that of the same sweep, locked for this process.

    Raises SweepError if it holds something else, cannot be written, or another process runs the sweep.
    """
    with contextlib.ExitStack() as held:
        try:
            found = _open(out, sweep, cells, storage, held)
        except OSError as exc:
            raise SweepError(f"--out {out}: cannot be written: {exc.strerror}; give another") from exc
        yield found  # what is raised while it is open need not be of this directory


def _open(
    out: Path, sweep: Sweep, cells: list[Cell], storage: Location | None, held: contextlib.ExitStack
) -> SweepDirectory:
    """As `opened`; `held` closes the lock. Raises OSError, too."""
    check(out, sweep, storage)
    out.mkdir(parents=True, exist_ok=True)
    lock = held.enter_context((out / _LOCK).open("a"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SweepError(f"--out {out}: another process runs this sweep; wait for it, or give a new --out") from None
    check(out, sweep, storage)
    if not (out / SWEEP).exists():
        _begin(out, sweep, cells, storage)
    return SweepDirectory(out, _read(out / SWEEP)["id"])


def check(out: Path, sweep: Sweep, storage: Location | None) -> None:
    """Raises SweepError for a directory that is neither new nor this sweep's."""
    if not out.exists():
        return
    if not out.is_dir():
        raise SweepError(f"--out {out}: is no directory; give a new one")
    kept = out / SWEEP
    if not kept.is_file():
        left = {path.name for path in out.iterdir()} - {_LOCK, REQUEST}
        if left:
            raise SweepError(f"--out {out}: is not empty, and holds no sweep; give a new directory")
        return
    known = _read(kept)
    if known.get("format") != FORMAT:
        raise SweepError(
            f"--out {out}: holds a sweep of format {known.get('format')}, not {FORMAT}; give a new directory"
        )
    if known.get("trace_format") not in READABLE_VERSIONS:
        raise SweepError(
            f"--out {out}: its traces have format {known.get('trace_format')}, and this program writes format "
            f"{SCHEMA_VERSION}: no report could show both; resume with the program that began it, or give another --out"
        )
    if (out / REQUEST).read_bytes() != sweep.text:
        raise SweepError(
            f"--out {out}: holds another sweep ({out / REQUEST} differs from the file); resume with that, or give a "
            "new directory"
        )
    before = known["storage"]
    if storage is not None and str(storage) != before:
        raise SweepError(f"--dir {storage}: the sweep in {out} was begun on {before}; give that, or a new --out")


def _begin(out: Path, sweep: Sweep, cells: list[Cell], storage: Location | None) -> None:
    (out / REQUEST).write_bytes(sweep.text)
    write_json(
        out / SWEEP,
        {
            "format": FORMAT,
            "id": secrets.token_hex(6),
            "trace_format": SCHEMA_VERSION,
            "name": sweep.name,
            "about": sweep.about,
            "repeats": sweep.repeats,
            "storage": str(storage or out / "storage"),
            "time_limit_s": sweep.time_limit_s,
            "storage_bytes": sweep.storage_bytes,
            "cells": [cell.to_json() for cell in cells],
        },
    )
    for name in (CELLS, PLANS):
        (out / name).mkdir(exist_ok=True)


def storage_of(out: Path) -> Location:
    """Where the checkpoints of a sweep go."""
    return location_of("--dir", _read(out / SWEEP)["storage"])


def _read(path: Path) -> dict[str, Any]:
    """An object from a file of the sweep. Raises SweepError naming it."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as exc:
        raise SweepError(f"{path}: is damaged: {exc}; give a new --out") from exc
    if not isinstance(content, dict):
        raise SweepError(f"{path}: is damaged: it holds no object; give a new --out")
    return content


def environment_facts(storage: Location) -> dict[str, Any]:
    """What of machine and software matters to the figures; no names."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "began_unix_s": round(time.time(), 3),
        "program": f"megatron-restart {__version__}",
        "machine": machine() | {"memory_bytes": memory, "usable_processors": len(os.sched_getaffinity(0))},
        "filesystem": filesystem_of(storage) if isinstance(storage, Path) else storage.store.in_words,
        "storage_free_bytes": shutil.disk_usage(storage).free if isinstance(storage, Path) else None,
        "versions": versions(),
        "executable_version": sys.version,
    }
