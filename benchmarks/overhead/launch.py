"""Starts the ranks of one measurement and reads back what they measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.ranks import own_directory, run_ranks
from benchmarks.overhead.plan import Plan, Request
from tools.common.machine import filesystem_of

_PREFIX = "overhead_"


@dataclass
class Measurement:
    """All samples of one place and number of ranks: samples[operation][variant][round][rank]."""

    directory: str
    filesystem: str
    ranks: int
    bytes_per_rank: int = 0
    files_per_rank: int = 0
    samples: dict[str, dict[str, list[list[dict[str, Any]]]]] = field(default_factory=dict)

    def seconds(self, operation: str, variant: str, name: str = "wall_s") -> list[float]:
        """One value per round: that of the slowest rank."""
        return [max(rank[name] for rank in ranks) for ranks in self.samples[operation][variant]]


def measure(place: Path, ranks: int, request: Request, progress: Callable[[str], None]) -> Measurement:
    """Measure below `place`, in a directory of its own that is removed whatever happens.

    Raises MeasurementError if a rank fails, OSError if `place` cannot be written.
    """
    found = Measurement(str(place), filesystem_of(place), ranks)
    with own_directory(place, _PREFIX) as directory, own_directory(Path(tempfile.gettempdir()), _PREFIX) as notes:
        output = str(notes / "samples.jsonl")
        plan = Plan(**asdict(request), ranks=ranks, directory=str(directory), output=output)
        (notes / "plan.json").write_text(json.dumps(asdict(plan)))
        run_ranks(Path(__file__).with_name("rank.py"), ranks, notes, _tell_of(request.rounds, notes, progress))
        _read_samples(notes / "samples.jsonl", found)
    return found


def _tell_of(rounds: int, notes: Path, progress: Callable[[str], None]) -> Callable[[], None]:
    """What tells `progress` of each further round."""
    seen = -1

    def tell() -> None:
        nonlocal seen
        done = _rounds_done(notes / "samples.jsonl")
        if done != seen:
            seen = done
            progress(f"round {done} of {rounds}")

    return tell


def _rounds_done(path: Path) -> int:
    if not path.exists():
        return 0
    lines = path.read_text().splitlines()
    return json.loads(lines[-1]).get("round", 0) if lines else 0


def _read_samples(path: Path, found: Measurement) -> None:
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "facts" in record:
            found.bytes_per_rank = record["facts"]["bytes_per_rank"]
            found.files_per_rank = record["facts"]["files_per_rank"]
        else:
            variants = found.samples.setdefault(record["operation"], {})
            variants.setdefault(record["variant"], []).append(record["ranks"])
