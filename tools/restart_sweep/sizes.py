"""Files and bytes of the checkpoints of a sweep at full size, as ckpt-plan says: asked once per layout and engine."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from ..ckpt_replay.options import FIT
from ..ckpt_replay.plan import CONNECTOR, RAW
from ..common.cli import parse_bytes, parse_rank_ranges
from ..common.sweep_files import PLANS, STORAGE, Cell, write_json

_KEPT = (
    "engine",
    "layout",
    "params_dtype",
    "vocab_size",
    "padded_vocab_size",
    "num_files",
    "total_bytes",
    "bytes_by_kind",
)


class Sizes:
    """Plans by the name of the cell's plan. With a directory they are kept there, and not asked for again."""

    def __init__(self, out: Path | None) -> None:
        self._out = None if out is None else out / PLANS
        self._known: dict[str, dict[str, Any]] = {}

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """A cell for each plan that is still to be made."""
        named = {cell.plan_name: cell for cell in cells if cell.mode != STORAGE}
        return [cell for name, cell in named.items() if self._find(name) is None]

    def make(self, cells: Iterable[Cell]) -> None:
        """Make the plans that are missing, in one process: to import torch takes longer than most plans."""
        missing = self.missing(cells)
        if not missing:
            return
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as planner:
            for cell, plan in zip(missing, planner.map(_plan, missing), strict=True):
                self._known[cell.plan_name] = plan
                if self._out is not None:
                    self._out.mkdir(exist_ok=True)
                    write_json(self._out / f"{cell.plan_name}.json", plan)

    def of(self, cell: Cell) -> dict[str, Any]:
        """num_files, total_bytes, bytes_per_rank and more; `error` alone where there can be no plan.

        Raises KeyError before `make` has made it.
        """
        self._find(cell.plan_name)
        return self._known[cell.plan_name]

    def written(self, cell: Cell) -> int | None:
        """Bytes that a cell has on the storage at the least: what the storage is measured with, or the saves that it
        keeps. None where that is not known before: of a scaled model, of what fits, and where there is no plan."""
        if cell.mode == STORAGE:
            return int(cell.settings["storage_bytes"])
        plan = self.of(cell)
        if cell.mode == "train":
            return plan.get("total_bytes")
        per_rank: list[int] | None = plan.get("bytes_per_rank")
        if cell.mode != "replay" or per_rank is None or cell.settings["limit_bytes"] == FIT:
            return None
        limit = str(cell.settings["limit_bytes"])
        most = None if limit == "none" else parse_bytes(limit)
        ranges = parse_rank_ranges(str(cell.settings["ranks"]))
        chosen = [per_rank[rank] for first, last in ranges for rank in range(first, last + 1) if rank < len(per_rank)]
        return sum(each if most is None else min(each, most) for each in chosen) * int(cell.settings.get("saves", 1))

    def _find(self, name: str) -> dict[str, Any] | None:
        if name not in self._known and self._out is not None and (self._out / f"{name}.json").is_file():
            self._known[name] = json.loads((self._out / f"{name}.json").read_text())
        return self._known.get(name)


def _plan(cell: Cell) -> dict[str, Any]:
    """What ckpt-plan says of the checkpoint of a cell; `error` if it refuses."""
    from ..ckpt_plan.cli import main

    if cell.engine in (*RAW, CONNECTOR):
        what = RAW.get(cell.engine, "a library, which divides its files itself")
        return {"error": f"{cell.engine} is {what}; ckpt-plan knows the files of engines", "command": []}
    if cell.fully_sharded:
        return {"error": "--sharding full: ckpt-plan knows the files of ZeRO-1 alone", "command": []}
    words = ["--model", cell.model, "--engine", cell.engine]
    words += ["--tp", str(cell.tp), "--pp", str(cell.pp), "--dp", str(cell.dp), "--format", "json"]
    if "vocab_size" in cell.settings:
        words += ["--vocab-size", str(cell.settings["vocab_size"])]
    command = ["ckpt-plan", *words]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(words)
    if status != 0:
        return {"error": (err.getvalue().strip().splitlines() or ["it said nothing"])[-1], "command": command}
    plan = json.loads(out.getvalue())
    found = {name: plan[name] for name in _KEPT}
    sizes = sorted(file["bytes"] for file in plan["files"])
    return found | {
        "command": command,
        "file_bytes": [sizes[0], sizes[len(sizes) // 2], sizes[-1]] if sizes else None,
        "bytes_per_rank": [rank["bytes"] for rank in plan["per_rank"]],
        "files_per_rank": [rank["num_files"] for rank in plan["per_rank"]],
    }
