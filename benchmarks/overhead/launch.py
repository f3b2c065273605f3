"""Starts the ranks of one measurement and reads back what they measured."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.ranks import own_directory, start_rank
from benchmarks.overhead.plan import Plan, Request
from megatron.processes.free_port import free_port
from tools.common.machine import filesystem_of

_POLL_S = 0.2
_PREFIX = "ckpt_overhead_"


class MeasurementError(RuntimeError):
    """A rank failed; the message holds the end of what it printed."""


@dataclass
class Measurement:
    """All samples of one place and number of ranks: samples[family][variant][round][rank]."""

    directory: str
    filesystem: str
    ranks: int
    bytes_per_rank: int = 0
    files_per_rank: int = 0
    samples: dict[str, dict[str, list[list[dict[str, Any]]]]] = field(default_factory=dict)

    def seconds(self, family: str, variant: str, name: str = "wall_s") -> list[float]:
        """One value per round: that of the slowest rank."""
        return [max(rank[name] for rank in ranks) for ranks in self.samples[family][variant]]


def measure(place: Path, ranks: int, request: Request, progress: Callable[[str], None]) -> Measurement:
    """Measure below `place`, in a directory of its own that is removed whatever happens.

    Raises MeasurementError if a rank fails, OSError if `place` cannot be written.
    """
    found = Measurement(str(place), filesystem_of(place), ranks)
    with (
        own_directory(place, _PREFIX) as directory,
        own_directory(Path(tempfile.gettempdir()), _PREFIX) as notes,
    ):
        output = str(notes / "samples.jsonl")
        plan = Plan(**asdict(request), ranks=ranks, directory=str(directory), output=output)
        (notes / "plan.json").write_text(json.dumps(asdict(plan)))
        port = free_port()
        started = [start_rank("benchmarks.overhead.rank", rank, ranks, notes, port) for rank in range(ranks)]
        try:
            _wait(started, notes, request.rounds, progress)
        finally:
            for process in started:
                process.kill()
                process.wait()
        _read_samples(notes / "samples.jsonl", found)
    return found


def _wait(
    started: list[subprocess.Popen[bytes]], notes: Path, rounds: int, progress: Callable[[str], None]
) -> None:
    seen = -1
    while any(process.poll() is None for process in started):
        for rank, process in enumerate(started):
            if process.poll():
                raise MeasurementError(_last_words(notes, rank, process.returncode))
        done = _rounds_done(notes / "samples.jsonl")
        if done != seen:
            progress(f"round {done} of {rounds}")
            seen = done
        time.sleep(_POLL_S)
    for rank, process in enumerate(started):
        if process.returncode:
            raise MeasurementError(_last_words(notes, rank, process.returncode))


def _last_words(notes: Path, rank: int, code: int) -> str:
    text = (notes / f"rank_{rank}.log").read_text(errors="replace").strip()
    return f"rank {rank} ended with exit code {code}:\n{text[-2000:]}"


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
            variants = found.samples.setdefault(record["family"], {})
            variants.setdefault(record["variant"], []).append(record["ranks"])
