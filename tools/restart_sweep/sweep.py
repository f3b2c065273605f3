"""The course of a sweep: every cell that has no result yet, one after the other."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.config.uris import Location, below
from restart_trace.redaction import redact_command

from ..ckpt_replay.locations import remove
from ..common.formatting import duration, plural, size
from ..common.sweep_files import FAILED, LOG, OK, Cell
from .commands import Places, command_of, environment
from .directory import SweepDirectory, SweepError, storage_of
from .progress import Times
from .running import Ended, end_all, run
from .sizes import Sizes

Say = Callable[[str], None]
_SAID_OF_A_FAILURE = 4  # last lines of its log


def run_cells(
    directory: SweepDirectory,
    cells: list[Cell],
    chosen: list[Cell],
    time_limit_s: float,
    say: Say,
    allocation: str | None = None,
) -> None:
    """Measure what is still to be measured of the chosen cells, which are those of `allocation` if it is given.

    Raises OSError, and SweepError if the storage has no room for a cell.
    """
    if ended := end_all(directory.id):
        say(f"ended {ended} processes that a killed sweep had left")
    storage = below(storage_of(directory.out), f"restart_sweep_{directory.id}")
    remove(storage)  # checkpoints of a cell that was interrupted
    own = directory.out / "storage"
    if isinstance(storage, Path):
        # --dir of an earlier start may be gone, such as a file system that is not mounted: it is not made anew.
        storage.mkdir(parents=storage.parent == own)
    directory.note_session(storage)
    sizes = Sizes(directory.out)
    _make_plans(sizes, chosen, say)
    waiting = [cell for cell in chosen if directory.result(cell) is None]
    if isinstance(storage, Path):
        _check_room(sizes, waiting, storage.parent)
    if len(waiting) < len(chosen):
        say(f"{len(chosen) - len(waiting)} of {plural(len(chosen), 'cell')} are done already")
    times = Times(directory, cells)
    for cell in waiting:
        result = _measure(directory, cell, below(storage, cell.name), time_limit_s, allocation)
        times.note(cell, result["took_s"])
        waiting = waiting[1:]
        said = result["status"] if result["status"] == OK else f"FAILED: {result['reason']}"
        left = f"; about {duration(times.of(waiting))} left" if waiting else ""
        say(
            f"[{cell.index + 1}/{len(cells)}] {cell.what}, repeat {cell.repeat}: {result['took_s']:.1f} s, {said}{left}"
        )
    remove(storage)
    shutil.rmtree(own, ignore_errors=True)


def _make_plans(sizes: Sizes, cells: list[Cell], say: Say) -> None:
    missing = sizes.missing(cells)
    if missing:
        say(f"planning {plural(len(missing), 'checkpoint')} at full size")
        sizes.make(missing)
    for cell in missing:
        plan = sizes.of(cell)
        if "error" in plan:
            say(f"no plan of {cell.plan_name}: {plan['error']}")


def _check_room(sizes: Sizes, waiting: list[Cell], storage: Path) -> None:
    """Raises SweepError if a cell would not fit on the storage: hours later it would only have failed."""
    known = [(num_bytes, cell) for cell in waiting if (num_bytes := sizes.written(cell)) is not None]
    num_bytes, cell = max(known, key=lambda one: one[0], default=(0, None))
    free = shutil.disk_usage(storage).free
    if cell is not None and num_bytes > free:
        raise SweepError(
            f"{storage}: {size(free)} are free, and cell {cell.index + 1}, {cell.what}, writes {size(num_bytes)}; free "
            "space, or begin anew with another --dir and --out, or with a smaller limit_bytes or storage_bytes"
        )


def _measure(
    directory: SweepDirectory, cell: Cell, storage: Location, time_limit_s: float, allocation: str | None
) -> dict[str, Any]:
    """Run a cell and record what came of it; what it stored is removed."""
    path = directory.begin_cell(cell)
    work = directory.out / "work" / f"{cell.mode}_{cell.model}"
    for needed in (storage, work):
        if isinstance(needed, Path):
            needed.mkdir(parents=True, exist_ok=True)
    command = command_of(cell, Places(path, storage, work), time_limit_s)
    load = os.getloadavg()[0]
    began = time.time()
    try:
        ended = run(command.words, environment(command.settings), path / LOG, directory.id, time_limit_s)
    finally:
        remove(storage)
    reason = _reason(ended, path / LOG, time_limit_s)
    result = {
        "name": cell.name,
        "allocation": allocation,
        "status": OK if reason is None else FAILED,
        "reason": reason,
        "exit_code": ended.exit_code,
        "began_unix_s": round(began, 3),
        "took_s": round(ended.took_s, 3),
        "load_average_1_min_before": round(load, 2),
        "command": redact_command(command.words),
        "settings": command.settings,
        "trace": command.trace,
    }
    directory.end_cell(cell, result)
    return result


def _reason(ended: Ended, log: Path, time_limit_s: float) -> str | None:
    """Why a cell failed; None if it did not."""
    if ended.exit_code == 0:
        return None
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    output = " / ".join(lines[-_SAID_OF_A_FAILURE:])[-600:] or "it printed nothing"
    if ended.exit_code is None:
        return f"not ended after {time_limit_s:g} s (time_limit); the log ends with: {output}"
    return f"exit code {ended.exit_code}: {output}"
