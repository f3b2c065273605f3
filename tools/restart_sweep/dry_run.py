"""What a sweep would do: its cells in their order, and the checkpoints at full size."""

from __future__ import annotations

from ..ckpt_replay.options import FIT
from ..common.formatting import plural, size
from ..common.sweep_files import STORAGE, Cell
from ..common.tables import Column, text_table, texts, titles
from .progress import to_stderr
from .sizes import Sizes
from .sweep_file import Sweep


def listing(sweep: Sweep, cells: list[Cell]) -> str:
    """Lines for a terminal. Asks ckpt-plan for the sizes, which takes seconds for each layout and engine."""
    sizes = Sizes(None)
    to_stderr(f"planning {plural(len(sizes.missing(cells)), 'checkpoint')} at full size")
    columns = (
        Column[Cell]("cell", lambda cell: str(cell.index + 1)),
        Column[Cell]("repeat", lambda cell: str(cell.repeat)),
        Column[Cell]("what", lambda cell: cell.what),
        Column[Cell]("ranks", lambda cell: "" if cell.mode == STORAGE else str(cell.ranks)),
        Column[Cell]("files", lambda cell: _planned(sizes, cell, "num_files")),
        Column[Cell]("full size", lambda cell: _planned(sizes, cell, "total_bytes")),
        Column[Cell]("this cell writes", lambda cell: _written(sizes, cell)),
    )
    lines = text_table(titles(columns), texts(columns, cells), indent="", left=3)
    errors = {cell.plan_name: plan["error"] for cell in cells if "error" in (plan := _plan(sizes, cell))}
    lines += ["", f"{sweep.name}: {plural(len(cells), 'cell')} in {plural(sweep.repeats, 'repeat')}"]
    lines += [f"no plan of {name}: {error}" for name, error in errors.items()]
    lines.append(
        "files and full size: of one checkpoint at full size, by ckpt-plan. A replay writes its ranks' share of one, "
        "limited by limit_bytes, twice (the first save is a warm-up); a scaled preset writes the same files, narrow."
    )
    return "\n".join(lines) + "\n"


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
