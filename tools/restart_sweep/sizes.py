"""Files and bytes of the checkpoints of a sweep at full size, as ckpt-plan says: asked once per layout and engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..ckpt_replay.options import FIT
from ..ckpt_replay.plan import RAW
from ..common.cli import parse_bytes, parse_rank_ranges
from ..common.sweep_files import PLANS, STORAGE, Cell, write_json
from .commands import PACKAGE, environment

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

    def of(self, cell: Cell) -> dict[str, Any]:
        """num_files, total_bytes, bytes_per_rank_max and more; `error` alone where there can be no plan."""
        known = self._find(cell.plan_name)
        if known is None:
            known = _ask(cell)
            self._known[cell.plan_name] = known
            if self._out is not None:
                self._out.mkdir(exist_ok=True)
                write_json(self._out / f"{cell.plan_name}.json", known)
        return known

    def written(self, cell: Cell) -> int | None:
        """Bytes that a cell has on the storage at the least: what the storage is measured with, or one save. None where
        that is not known before: of a scaled model, of what fits, and where there is no plan."""
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
        return sum(each if most is None else min(each, most) for each in chosen)

    def _find(self, name: str) -> dict[str, Any] | None:
        if name not in self._known and self._out is not None and (self._out / f"{name}.json").is_file():
            self._known[name] = json.loads((self._out / f"{name}.json").read_text())
        return self._known.get(name)


def _ask(cell: Cell) -> dict[str, Any]:
    if cell.engine in RAW:
        return {"error": f"{cell.engine} is {RAW[cell.engine]}; ckpt-plan knows the files of engines", "command": []}
    words = [sys.executable, "-m", f"{PACKAGE}.ckpt_plan", "--model", cell.model, "--engine", cell.engine]
    words += ["--tp", str(cell.tp), "--pp", str(cell.pp), "--dp", str(cell.dp), "--format", "json"]
    if "vocab_size" in cell.settings:
        words += ["--vocab-size", str(cell.settings["vocab_size"])]
    done = subprocess.run(words, env=environment({}), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1], "command": words[1:]}
    plan = json.loads(done.stdout)
    found = {name: plan[name] for name in _KEPT}
    return found | {
        "command": words[1:],
        "bytes_per_rank": [rank["bytes"] for rank in plan["per_rank"]],
        "files_per_rank": [rank["num_files"] for rank in plan["per_rank"]],
    }
