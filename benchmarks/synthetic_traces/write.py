"""Writes the made-up run, with all processors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from benchmarks.synthetic_traces.lines import RUN_ID, rank_lines, supervisor_lines
from benchmarks.synthetic_traces.plants import OTHER_VERSION, file_name, plant_in_files
from benchmarks.synthetic_traces.schedule import make_schedule
from benchmarks.synthetic_traces.shape import Shape
from benchmarks.synthetic_traces.times import Cycle, Times
from benchmarks.synthetic_traces.truth import make_truth
from restart_trace.schema import CYCLE_FILE_PATTERN, SCHEMA_VERSION, SUPERVISOR_FILE_PATTERN

TRUTH = "truth.json"
_ONE_PROCESS_UP_TO = 200_000  # spans: below, starting others takes longer than they save
_RANKS_AT_ONCE = 64


def write_run(directory: Path, shape: Shape) -> dict[str, Any]:
    """Write logs and truth.json into `directory`, which is made if missing; returns the truth.

    Raises OSError if that cannot be done, such as FileExistsError if the directory holds anything.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise FileExistsError(f"{directory}: is not empty")
    times = Times(shape)
    cycles, failure = make_schedule(times)
    for cycle in cycles:
        claim = {"run_id": RUN_ID, "cycle": cycle.number, "launch_key": f"launch-{cycle.number}", "wall_ns": 0}
        name = CYCLE_FILE_PATTERN.format(cycle=cycle.number)
        (directory / name).write_text(json.dumps(claim) + "\n")
    _write_ranks(directory, shape, cycles)
    lines = supervisor_lines(times, cycles[0], failure)
    (directory / SUPERVISOR_FILE_PATTERN.format(index=0)).write_text("".join(lines))
    plant_in_files(directory, shape)
    truth = make_truth(times, cycles, failure)
    (directory / TRUTH).write_text(json.dumps(truth, indent=1) + "\n")
    return truth


def _write_ranks(directory: Path, shape: Shape, cycles: list[Cycle]) -> None:
    if shape.ranks * shape.saves * 10 < _ONE_PROCESS_UP_TO:
        _write_some(directory, shape, cycles, range(shape.ranks))
        return
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers) as pool:
        done = pool.map(_write_some, repeat(directory), repeat(shape), repeat(cycles), _shares(shape.ranks))
        for _ in done:  # raises what a worker raised
            pass


def _shares(ranks: int) -> Iterator[range]:
    for first in range(0, ranks, _RANKS_AT_ONCE):
        yield range(first, min(first + _RANKS_AT_ONCE, ranks))


def _write_some(directory: Path, shape: Shape, cycles: list[Cycle], ranks: range) -> None:
    times = Times(shape)
    other = shape.planted_rank("mixed-versions")
    for rank in ranks:
        for cycle in cycles:
            version = OTHER_VERSION if cycle.number == 1 and rank == other else SCHEMA_VERSION
            text = "".join(rank_lines(times, cycle, rank, version))
            (directory / file_name(rank, cycle.number)).write_text(text)
