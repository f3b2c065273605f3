"""Checks which rules of MLPerf Storage for checkpoints a sweep does not follow. docs/rules.md lists them.

They are those of its Rules.md (mlcommons/storage, commit 0366ccf), as results of v3.0 were validated by. That files are
synchronised (4.3.2) is a rule of every valid run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ...common.formatting import plural
from ...common.sweep_files import REPLAY, STORAGE
from .read import Sweep, read_json
from .samples import Measured

_OPERATIONS, _TIMES, _VOCABULARY, _LEAST_PER_HOST = "saves_then_loads", 10, 128256, 5
# Models of its table 2 whose shape a preset of ours has: its name, (TP, PP, DP).
_MODELS = {"7b": ("8B", (1, 1, 8)), "mlperf70b": ("70B", (8, 1, 8)), "405b": ("405B", (8, 32, 2))}
_OTHER_SHAPES = {
    "70b": "has 64 heads, and the 70B of table 2 has 128: give mlperf70b",
    "1t": "has 168 and 24 heads, and the 1T 192 and 32",
}


def deviations(sweep: Sweep, measured: list[Measured]) -> list[str]:
    """Sentences, each beginning with the number of its rule; empty if all replays follow the rules."""
    found = [
        f"{rule}: {one.cell.cell.name} {what}"
        for one in measured
        if one.cell.cell.mode != STORAGE
        for rule, what in _of(one)
    ]
    return found or ([] if sweep.measured else ["4.7.1: nothing was measured"])


def _of(one: Measured) -> Iterator[tuple[str, str]]:
    cell = one.cell.cell
    if cell.mode != "replay":
        yield "4.3.3", "is no replay of a checkpoint"
        return
    figures = read_json(one.cell.directory / REPLAY)  # what ran: `flags` of a cell may overrule its other keys
    yield from _model(figures)
    if one.facts["limited"]:
        yield "4.3.3", "has a part of the checkpoint; limit_bytes: none has all of it"
    processes = math.prod(figures["layout"].values())
    if one.facts["ranks"] != processes:
        yield "4.6.1", f"has {one.facts['ranks']} processes, and its layout {processes}; a part is no subset (4.3.5)"
    hosts = one.facts["hosts"]
    if hosts and one.facts["ranks"] < _LEAST_PER_HOST * hosts:
        yield "4.6.2", f"has {one.facts['ranks']} processes on {plural(hosts, 'host')}; more than 4 a host are needed"
    if figures["operations"] != _OPERATIONS:
        yield "4.7.1", f"reads before all checkpoints are written; operations: {_OPERATIONS} does not"
    engine = figures["engines"][cell.engine]
    for name, metric in (("writes", "durable_s"), ("cold reads", "load_cold_s")):
        count = len(engine[metric]["samples"]) if engine[metric] is not None else 0
        if count != _TIMES:
            why = " (4.3.1: caches are cleared between)" if metric == "load_cold_s" else ""
            yield "4.7.1", f"has {count} {name}, and not {_TIMES}{why}"


def _model(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    model, found = figures["model"], figures["layout"]
    if model not in _MODELS:
        yield "4.3.3", f"has model {model}, which {_OTHER_SHAPES.get(model, 'is not in table 2')}"
        return
    name, layout = _MODELS[model]
    if tuple(found[axis] for axis in ("tp", "pp", "dp")) != layout:
        has = " ".join(f"{axis.upper()}{size}" for axis, size in found.items())
        yield "4.3.3", f"has {has}, and {name} has {'x'.join(map(str, layout))}"
    if figures.get("vocab_size") != _VOCABULARY:
        yield "4.3.3", f"has another vocabulary than {name}; vocab_size: {_VOCABULARY} is that"
