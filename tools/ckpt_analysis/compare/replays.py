"""Reads the JSON of `ckpt-replay` (--output, --format json) as a report with one cycle for each engine."""

from __future__ import annotations

import json
import math
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..common.problems import Problem
from ..ingest.discover import LogDirectoryError
from ..metrics.phases import throughput_GBps
from ..metrics.results import OperationStats
from ..model.replayed import Replayed
from ..model.run_info import CycleInfo
from ..report import Report
from .metrics import OF_REPLAY

_KEYS = {"engines", "layout", "bytes_per_rank", "machine", "steps"}


def read_replay(path: Path) -> Report:
    """The report of a replay. Raises LogDirectoryError naming the file if it is not as ckpt-replay writes it."""
    try:
        figures = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise LogDirectoryError(f"{path}: cannot be read as JSON: {exc}") from exc
    if not isinstance(figures, dict) or not figures.keys() >= _KEYS:
        raise LogDirectoryError(
            f"{path}: is not the JSON of a replay; give what `ckpt-replay --output FILE` wrote, or a directory"
        )
    try:
        return _report(figures, path)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as exc:
        raise LogDirectoryError(f"{path}: is not as ckpt-replay writes it: {exc!r}; run the replay again") from exc


def _report(figures: dict[str, Any], path: Path) -> Report:
    replayed = _replayed(figures)
    cycles, saves = [], []
    for cycle, engine in enumerate(figures["engines"]):
        cycles.append(_cycle(cycle, engine, figures, replayed))
        saves += _saves(cycle, engine, figures, replayed)
    if not cycles:
        raise ValueError("no engine was measured")
    model = None if figures["model"] is None else str(figures["model"])
    return Report(path, path.stem, cycles, saves, [], [], _problems(figures), model=model, replayed=replayed)


def _replayed(figures: dict[str, Any]) -> Replayed:
    limited = figures["limited"]
    return Replayed(
        storage=figures["directory"] + (f" ({kind})" if (kind := figures["machine"]["filesystem"]) else ""),
        ranks=len(figures["ranks"]),
        world_size=math.prod(map(int, figures["layout"].values())),
        hosts=_hosts(figures),
        share=figures["bytes_per_rank"] / limited["full_bytes_per_rank"] if limited else 1.0,
        values={
            str(engine): {one.name: values for one in OF_REPLAY if (values := _samples(found[one.name]))}
            for engine, found in figures["engines"].items()
            if not found["failed"]
        },
        conditions=_conditions(figures),
        not_measured={str(engine): _not_measured(found) for engine, found in figures["engines"].items()},
    )


def _hosts(figures: dict[str, Any]) -> int | None:
    """How many hosts the ranks ran on; None if no engine saved, or if an older version wrote the JSON."""
    hosts = figures.get("hosts")
    if hosts is not None and (type(hosts) is not int or hosts < 1):
        raise ValueError(f"{hosts!r} hosts")
    return hosts


def _not_measured(found: dict[str, Any]) -> dict[str, str]:
    """Metric -> why an engine has no values of it."""
    reasons = {str(figure): str(why) for figure, why in found["not_measured"].items()}
    if found["in_memory_s"]:
        reasons["durable_s"] = "its saves are in memory alone: see in_memory_s"
    return reasons


def _conditions(figures: dict[str, Any]) -> dict[str, str]:
    """What a replay ran with, besides its engines: options, the steps between saves, and the machine."""
    steps = figures["steps"] or {}
    found = {name: value for name, value in figures["options"].items() if name != "checkpoint_durability"}
    found |= {name: figures.get(name) for name in ("sharding", "operations", "small_tensors", "vocab_size", "striping")}
    found |= {"steps_s": steps.get("total_s"), "steps": steps.get("work")}
    found |= {name: figures["machine"].get(name) for name in ("processors", "kernel")}
    return {name: str(value) for name, value in found.items() if value is not None}


def _problems(figures: dict[str, Any]) -> list[Problem]:
    """One for each engine that failed."""
    failed = {str(engine): found["failed"] for engine, found in figures["engines"].items() if found["failed"]}
    return [
        Problem("failed_operation", f"engine {engine} failed: {error}", {"engine": engine})
        for engine, error in failed.items()
    ]


def _samples(figure: dict[str, Any] | None) -> list[float]:
    values = [float(value) for value in figure["samples"]] if figure else []
    if not all(math.isfinite(value) and value >= 0 for value in values):
        raise ValueError(f"a sample that is no number of 0 or more in {values}")
    return values


def _cycle(cycle: int, engine: str, figures: dict[str, Any], replayed: Replayed) -> CycleInfo:
    used = figures["engines"][engine]["engine_used"]
    return CycleInfo(
        cycle=cycle,
        expected=replayed.ranks,
        present=replayed.ranks,
        missing=[],
        layout={str(axis): int(degree) for axis, degree in figures["layout"].items()},
        hosts=[],
        engine_asked=str(engine),
        engine_used=None if used is None else str(used),
        durability=str(figures["options"]["checkpoint_durability"]),
        versions={},
        coordinates={},
        label=replayed.label,
    )


def _saves(cycle: int, engine: str, figures: dict[str, Any], replayed: Replayed) -> list[OperationStats]:
    """The saves of an engine, one per repeat; of one that failed, its failure."""
    found = figures["engines"][engine]
    of_all = {"operation": "save", "cycle": cycle, "engine": engine, "ranks": replayed.ranks}
    if found["failed"]:
        return [OperationStats(**of_all, finished_ranks=0, outcome="failed", error=str(found["failed"]))]
    written = [int(size) for size in found["written_bytes"] if size is not None]
    num_bytes = sum(written) if len(written) == replayed.ranks else None
    durable = figures["options"]["checkpoint_durability"] != "none"
    return [
        OperationStats(
            **of_all,
            finished_ranks=replayed.ranks,
            outcome="ok",
            bytes=num_bytes,
            blocked_s=blocked_s,
            committed_s=committed_s,
            durable_s=committed_s if durable else None,
            durable=durable,
            blocked_GBps=throughput_GBps(num_bytes, blocked_s),
        )
        for blocked_s, committed_s in zip_longest(_samples(found["blocked_s"]), _samples(found["durable_s"]))
    ]
