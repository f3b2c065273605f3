"""Starts the ranks of each layout in turn and reads back what they measured."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.ranks import own_directory, run_ranks
from benchmarks.reshard.plan import SOURCE, Plan, Request, hidden_size


@dataclass
class Measurement:
    """All samples of the layout that loads: samples[variant][round][rank]."""

    layout: tuple[int, int, int]
    facts: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)

    def seconds(self, variant: str) -> list[float]:
        """One value per round: that of the slowest rank."""
        return [max(rank["wall_s"] for rank in ranks) for ranks in self.samples[variant]]


def measure(place: Path, request: Request, progress: Callable[[str], None]) -> list[Measurement]:
    """Measure below `place`, in a directory of its own that is removed whatever happens.

    Raises MeasurementError if a rank fails, OSError if `place` cannot be written.
    """
    with own_directory(place, "reshard_") as directory:
        hidden = hidden_size(request.bytes)
        plan = Plan(hidden, SOURCE, str(directory), str(directory / "samples.jsonl"), None, request.cold)
        progress(f"saving on TP{SOURCE[0]} PP{SOURCE[1]} DP{SOURCE[2]}")
        _run(plan, directory, lambda: None)
        return [_measure_on(target, plan, request, directory, progress) for target in request.onto]


def _measure_on(
    target: tuple[int, int, int], saved: Plan, request: Request, directory: Path, progress: Callable[[str], None]
) -> Measurement:
    output = directory / ("samples_" + "_".join(map(str, target)) + ".jsonl")
    plan = Plan(saved.hidden_size, target, str(directory), str(output), request.rounds, request.cold)
    found = Measurement(target)
    seen = -1

    def tell() -> None:
        nonlocal seen
        done = len(output.read_text().splitlines()) if output.exists() else 0
        if done != seen:
            seen = done
            progress(f"loading on TP{target[0]} PP{target[1]} DP{target[2]}: sample {max(0, done - 1)}")

    _run(plan, directory, tell)
    for line in output.read_text().splitlines():
        record = json.loads(line)
        if "facts" in record:
            found.facts = record["facts"]
        else:
            found.samples.setdefault(record["variant"], []).append(record["ranks"])
    for path in directory.glob("own_*"):
        shutil.rmtree(path)
    return found


def _run(plan: Plan, directory: Path, poll: Callable[[], None]) -> None:
    """Have all ranks of the plan's layout carry it out; none is left when this returns."""
    (directory / "plan.json").write_text(json.dumps(asdict(plan)))
    run_ranks(Path(__file__).with_name("rank.py"), math.prod(plan.layout), directory, poll)
