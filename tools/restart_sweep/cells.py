"""The cells of a sweep in the order in which they are measured."""

from __future__ import annotations

from itertools import product
from typing import Any

from ..ckpt_replay.plan import SAVE_AND_LOAD
from ..common.sweep_files import BOTH, COLD, NO_STRIPING, STORAGE, WARM, Cell
from .sweep_file import Run, Sweep, layouts_of


def cells_of(sweep: Sweep) -> list[Cell]:
    """All cells: repeat after repeat, and in each the variants of a model and layout one after the other.

    With every repeat the variants begin with another one, so that none is always the first after a change.
    """
    found: list[dict[str, Any]] = []
    for repeat in range(1, sweep.repeats + 1):
        if sweep.storage_bytes:
            found.append(_storage(repeat, sweep.storage_bytes))
        for run in sweep.runs:
            for model in run.models:
                for tp, pp, dp in layouts_of(run, model):
                    place = {"repeat": repeat, "model": model, "tp": tp, "pp": pp, "dp": dp}
                    variants = _variants(run)
                    first = (repeat - 1) % len(variants)
                    found += [place | variant for variant in variants[first:] + variants[:first]]
    return [Cell(index=index, **fields) for index, fields in enumerate(found)]


def _variants(run: Run) -> list[dict[str, Any]]:
    """What is compared with each other: engines, page cache, faults, save intervals, operations, striping."""
    states = [BOTH if COLD in run.cache else WARM] if run.mode == "replay" else list(run.cache)
    axes = (run.striping, run.operations, run.save_intervals, run.faults, states, run.engines)
    return [
        {"mode": run.mode, "engine": engine, "cache": cache, "fault": fault, "save_interval": interval,
         "settings": run.settings | _of_replay(operations, striping)}
        for striping, operations, interval, fault, cache, engine in product(*axes)
    ]  # fmt: skip


def _of_replay(operations: str, striping: str) -> dict[str, str]:
    """Settings that are not what a replay does by itself: then a cell is the same as one of a sweep without the key."""
    found = {} if operations == SAVE_AND_LOAD else {"operations": operations}
    return found | ({} if striping == NO_STRIPING else {"striping": striping})


def _storage(repeat: int, storage_bytes: int) -> dict[str, Any]:
    return {
        "repeat": repeat, "mode": STORAGE, "model": "", "tp": 1, "pp": 1, "dp": 1, "engine": "", "cache": "",
        "fault": "", "save_interval": None, "settings": {"storage_bytes": storage_bytes},
    }  # fmt: skip
