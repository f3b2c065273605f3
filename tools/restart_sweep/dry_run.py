"""What a sweep would do: its cells in their order, and the checkpoints at full size."""

from __future__ import annotations

import math
from collections import Counter

from ..ckpt_replay.options import FIT
from ..common.formatting import plural, size
from ..common.sweep_files import STORAGE, Cell
from ..common.tables import Column, text_table, texts, titles
from .allocations import allocations_of
from .commands import LAUNCHED
from .progress import to_stderr
from .sizes import Sizes
from .sweep_file import Sweep


def listing(sweep: Sweep, cells: list[Cell]) -> str:
    """Lines for a terminal. Has ckpt-plan work out the sizes, which takes seconds."""
    sizes = Sizes(None)
    to_stderr(f"planning {plural(len(sizes.missing(cells)), 'checkpoint')} at full size")
    sizes.make(cells)
    repeats = Counter(_all_but_repeat(cell) for cell in cells)
    firsts: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        firsts.setdefault(_all_but_repeat(cell), cell)
    columns = (
        Column[Cell]("cell", lambda cell: str(cell.index + 1)),
        Column[Cell]("repeats", lambda cell: f"x {repeats[_all_but_repeat(cell)]}"),
        Column[Cell]("what", lambda cell: cell.what),
        Column[Cell]("ranks", lambda cell: "" if cell.mode == STORAGE else str(cell.ranks)),
        Column[Cell]("files", lambda cell: _planned(sizes, cell, "num_files")),
        Column[Cell]("full size", lambda cell: _planned(sizes, cell, "total_bytes")),
        Column[Cell]("this cell writes", lambda cell: _written(sizes, cell)),
    )
    lines = text_table(titles(columns), texts(columns, list(firsts.values())), indent="", left=3)
    reasons: dict[str, set[str]] = {}
    for cell in cells:
        if "error" in (plan := _plan(sizes, cell)):
            reasons.setdefault(str(plan["error"]), set()).add(f"{cell.model} {cell.layout}")
    lines.append("")
    lines += [f"no plan of {plural(len(of), 'layout')}: {error}" for error, of in reasons.items()]
    lines.append(
        "files and full size: of one checkpoint at full size, by ckpt-plan. A replay writes its ranks' share of one, "
        "limited by limit_bytes, twice (the first save is a warm-up); a scaled preset writes the same files, narrow."
    )
    return "\n".join([*lines, "", *_allocations(sweep, cells), *_totals(sweep, sizes, cells)]) + "\n"


def _all_but_repeat(cell: Cell) -> tuple[str, str]:
    """What the repeats of a measurement have in common."""
    return cell.what, repr(cell.settings)


def _allocations(sweep: Sweep, cells: list[Cell]) -> list[str]:
    """What the jobs of --submit allocate; nothing if no cell needs GPUs or other nodes."""
    if not any(cell.mode in LAUNCHED for cell in cells):
        return []
    lines = ["allocations, as --submit makes them of cells that need the same nodes (GPUS_PER_NODE, default 8):"]
    for each in allocations_of(cells):
        hours, gpu_hours = each.most_hours(sweep.time_limit_s), each.most_gpu_hours(sweep.time_limit_s)
        lines.append(
            f"  {each.name} (nodes x GPUs): {plural(len(each.cells), 'cell')}, at most {_rounded_up(hours)} hours and "
            f"{_rounded_up(gpu_hours)} GPU-hours"
        )
    return [*lines, ""]


def _totals(sweep: Sweep, sizes: Sizes, cells: list[Cell]) -> list[str]:
    """What all cells take: a bound where that is known only once they have run."""
    modes = Counter(cell.mode for cell in cells)
    kinds = ", ".join(f"{number} {mode}" for mode, number in modes.items())
    written = [_written_in_all(sizes, cell) for cell in cells]
    unknown = written.count(None)
    more = f", and what {plural(unknown, 'cell')} write, which is not known before" if unknown else ""
    limit_h = sweep.time_limit_s / 3600
    lines = [
        f"{sweep.name}: {plural(len(cells), 'cell')} in {plural(sweep.repeats, 'repeat')}: {kinds}",
        f"bytes: {size(sum(each for each in written if each is not None))}{more}; a cell's files go when it ends",
        f"hours: at most {_rounded_up(len(cells) * limit_h)}, with time_limit {sweep.time_limit_s:g} s for each cell",
    ]
    with_gpus = [each for each in allocations_of(cells) if each.gpus]
    gpu_hours = sum(each.most_gpu_hours(sweep.time_limit_s) for each in with_gpus)
    of = ""
    if with_gpus:
        number, most = sum(len(each.cells) for each in with_gpus), max(each.nodes * each.gpus for each in with_gpus)
        of = f": {plural(number, 'cell')} in allocations of whole nodes, at most {most} GPUs at a time"
    return [*lines, f"GPU-hours: at most {_rounded_up(gpu_hours)}{of}"]


def _rounded_up(hours: float) -> str:
    return f"{math.ceil(hours * 10) / 10:,.10g}" if hours < 10 else f"{math.ceil(hours):,}"


def _written_in_all(sizes: Sizes, cell: Cell) -> int | None:
    """Bytes of all saves of a cell; None if the file of the sweep does not tell."""
    if cell.engine == "none":
        return 0
    once = sizes.written(cell)
    if once is None or cell.mode == STORAGE:
        return once
    if cell.mode == "replay":
        return once * (1 if cell.settings.get("operations") == "load" else 2)
    iterations = cell.settings.get("iterations")
    if iterations is None or cell.save_interval is None:
        return None
    return int(once * -(-iterations // cell.save_interval))


def _plan(sizes: Sizes, cell: Cell) -> dict[str, object]:
    return {} if cell.mode == STORAGE else sizes.of(cell)


def _planned(sizes: Sizes, cell: Cell, name: str) -> str:
    value = _plan(sizes, cell).get(name)
    if not isinstance(value, int):
        return "-"
    return size(value) if name == "total_bytes" else str(value)


def _written(sizes: Sizes, cell: Cell) -> str:
    """Of a replay: what one of its saves writes."""
    if cell.mode == "replay" and cell.settings["limit_bytes"] == FIT:
        return "what fits"
    num_bytes = sizes.written(cell)
    return "-" if num_bytes is None else size(num_bytes)
