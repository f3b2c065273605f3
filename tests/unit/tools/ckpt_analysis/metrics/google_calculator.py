"""Jobs, and what Google's own calculator makes of them: the golden file of tests/golden/google_goodput.json.

    pip install --no-deps --target DIRECTORY ml-goodput-measurement==0.2.3
    python -m tests.unit.tools.ckpt_analysis.metrics.google_calculator DIRECTORY > tests/golden/google_goodput.json

The calculator itself is not changed. It reads its log entries through an object of ours, in place of a client of Google
Cloud. The other modules of Google Cloud that it imports are empty here: it does not use them.
"""

from __future__ import annotations

import datetime
import importlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.ckpt_analysis.metrics.goodput.google import JobCycle

VERSION = "0.2.3"
EPOCH_S = 1_760_000_000.0  # of all times: the package's are Unix times
EMPTY_MODULES = ("google.cloud", "google.cloud.logging", "google.cloud.storage")


def steps(first: int, last: int, start_s: float, each_s: float = 1.0) -> list[tuple[int, float]]:
    """Starts of steps that follow one another."""
    return [(step, start_s + (step - first) * each_s) for step in range(first, last + 1)]


def _launch(number: int, start_s: float, first: int, last: int, *, ended: bool = False) -> JobCycle:
    """A launch of 10 s before its first step, which takes 3 s; the others take 1 s."""
    made = [(first, start_s + 10.0), *steps(first + 1, last, start_s + 13.0)]
    return JobCycle(
        started_s=start_s,
        ended_s=made[-1][1] + 1.5 if ended else None,
        init_s=2.0,
        preparation_s=3.25,
        data_s=0.5 + number,
        steps=made,
        saves=[(step, 0.25) for step in range(first, last + 1) if step % 5 == 0],
        restores=[(first - 1, 0.75)] if first > 1 else [],
    )


def _at_random(seed: int) -> list[JobCycle]:
    """Up to five launches with all that can happen to them; the last one may have no end."""
    draw = random.Random(seed)
    at, reached, cycles = 0.0, 0, []
    for number in range(draw.randint(1, 5)):
        first = draw.randint(max(0, reached - 6), reached + draw.choice((0, 1, 1, 3)))
        count = draw.choice((0, 1, 2, 12))
        made = []
        start_s = at + draw.uniform(0, 20)
        clock = start_s + draw.uniform(1, 9)
        for step in range(first, first + count):
            made.append((step, clock))
            clock += draw.uniform(0.1, 4)
        reached = max(reached, first + count)
        cycle = _launch(number, start_s, 1, 1)
        cycles.append(
            replace(
                cycle,
                data_s=draw.choice((None, 0.0, draw.uniform(0, 3))),
                init_s=draw.uniform(0, 2),
                steps=made,
                saves=[(step, draw.uniform(0, 0.1)) for step, _ in made if draw.random() < 0.3],
                restores=[(first, draw.uniform(0, 2))] * draw.randint(0, 2),
            )
        )
        at = clock
    return [*cycles[:-1], replace(cycles[-1], ended_s=at + 1)] if draw.random() < 0.7 else cycles


def jobs() -> dict[str, list[JobCycle]]:
    """All cases, by name."""
    named = {
        "one launch": [_launch(0, 0, 1, 12, ended=True)],
        "one launch, still running": [_launch(0, 0, 1, 12)],
        "a restart that lost three steps": [_launch(0, 0, 1, 8), _launch(1, 60, 6, 12, ended=True)],
        "a restart that lost nothing": [_launch(0, 0, 1, 5), _launch(1, 60, 6, 12, ended=True)],
        "three launches": [_launch(0, 0, 1, 8), _launch(1, 60, 6, 9), _launch(2, 120, 6, 12, ended=True)],
        "started again from scratch": [_launch(0, 0, 0, 4), _launch(1, 60, 0, 4, ended=True)],
        "a step at most": [_launch(0, 0, 1, 1), _launch(1, 60, 1, 1, ended=True)],
        "no step": [replace(_launch(0, 0, 1, 1, ended=True), steps=[])],
        "ended well between": [_launch(0, 0, 1, 5, ended=True), _launch(1, 100, 6, 12, ended=True)],
        "ended well, then still running": [_launch(0, 0, 1, 5, ended=True), _launch(1, 100, 6, 12)],
        "saved twice": [replace(_launch(0, 0, 1, 6, ended=True), saves=[(5, 0.2), (5, 0.6), (6, 0.1)])],
    }
    return named | {f"at random, {seed}": _at_random(seed) for seed in range(40)}


def entries(cycles: list[JobCycle]) -> Iterator[dict[str, Any]]:
    """The events of a job as the package's recorder writes them."""
    for cycle in cycles:
        start_s = cycle.started_s + EPOCH_S
        yield {"job_start_time": start_s}
        durations = [("tpu_init", cycle.init_s), ("training_prep", cycle.preparation_s), ("data_loading", cycle.data_s)]
        for name, seconds in durations:
            if seconds is not None:
                yield {f"{name}_start_time": start_s}
                yield {f"{name}_end_time": start_s + seconds}
        for step, seconds in cycle.restores:
            taken = {"checkpoint_manager_duration_secs": seconds, "checkpointer_duration_secs": seconds}
            yield {"event_type": "restore", "step": step, "directory": "gs://bucket", **taken}
        for step, at in cycle.steps:
            yield {"step_count": step, "step_start_time": at + EPOCH_S}
        for step, seconds in cycle.saves:
            taken = {"checkpoint_manager_blocking_duration_secs": seconds, "checkpointer_blocking_duration_secs": 0.0}
            taken |= {"wait_for_prev_duration_secs": 0.0, "get_old_steps_duration_secs": 0.0}
            yield {"event_type": "save", "step": step, "directory": "gs://bucket", **taken}
        if cycle.ended_s is not None:
            yield {"job_end_time": cycle.ended_s + EPOCH_S}


class EntryReader:
    """Gives the calculator entries where it reads Google Cloud's log."""

    def __init__(self, found: list[dict[str, Any]]) -> None:
        self._found = found

    def read_cloud_logging_entries(self, **_: Any) -> tuple[list[dict[str, Any]], tuple[datetime.datetime, str]]:
        """All entries, and which is the last."""
        return self._found, (datetime.datetime.now(datetime.timezone.utc), "last")


def load_calculator(directory: Path) -> Any:
    """The package's module `goodput`, of an installation in `directory`, in this process."""
    for name in EMPTY_MODULES:
        sys.modules[name] = ModuleType(name)
    sys.modules["google.cloud.logging"].Client = object  # type: ignore[attr-defined]  # names a type
    sys.modules["google.cloud"].storage = sys.modules["google.cloud.storage"]  # type: ignore[attr-defined]
    package = ModuleType("ml_goodput_measurement")  # whose __init__ imports monitoring for Google Cloud
    package.__path__ = [str(directory / "ml_goodput_measurement")]
    sys.modules["ml_goodput_measurement"] = package
    return importlib.import_module("ml_goodput_measurement.src.goodput")


def calculated(goodput: Any, cycles: list[JobCycle]) -> dict[str, Any] | None:
    """Seconds by the package's names, without those up to now of a job that goes on; None where it refuses the job."""
    with tempfile.TemporaryDirectory() as cache:
        calculator = goodput.GoodputCalculator(
            job_name="job", logger_name="log", cloud_logger=EntryReader([*entries(cycles)]), cache_dir=cache
        )
        try:
            calculator.get_job_goodput()
        except ValueError:
            return None
        details = calculator.get_job_goodput_details()
    badput = {kind.name.lower(): spent for kind, spent in details["badput_time"].items() if isinstance(spent, float)}
    (productive,) = details["goodput_time"].values()
    if all(cycle.ended_s is None for cycle in cycles):
        del badput["other"]
        details["total_elapsed_time"] = None
    return {
        "total_s": details["total_elapsed_time"],
        "productive_s": productive,
        "badput_s": badput,
        "disruptions": details["disruption_count"],
    }


def results(directory: Path) -> dict[str, Any]:
    """All cases with what the package that is installed in `directory` makes of them."""
    goodput = load_calculator(directory)
    return {"version": VERSION, "calculated": {name: calculated(goodput, cycles) for name, cycles in jobs().items()}}


if __name__ == "__main__":
    json.dump(results(Path(sys.argv[1])), sys.stdout, indent=1, sort_keys=True)
    print()
