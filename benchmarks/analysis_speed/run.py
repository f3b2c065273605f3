"""Runs commands and takes their time and memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Taken:
    """What a command took: wall time, processor time, the most memory that it held at once, and what it printed."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    output: str


def run(*words: str) -> Taken:
    """Run `python -m` with these words in the project's root. Raises RuntimeError if it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    output = process.stdout.read()  # errors are a line, so the other pipe cannot fill up
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise RuntimeError(f"python -m {' '.join(words)}: exit status {process.returncode}: {said.strip()}")
    return Taken(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, output)


def median_of(taken: list[Taken]) -> float:
    """Seconds."""
    return statistics.median(one.seconds for one in taken)


def directory_bytes(directory: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in directory.glob(pattern) if path.is_file())
