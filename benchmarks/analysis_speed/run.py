"""Runs commands and takes their time and memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
_SAMPLED_EVERY_S = 0.05


@dataclass(frozen=True)
class Taken:
    """What a command and its processes took: wall time, processor time, memory, and what it printed.

    `peak_bytes`: the most that all of them held at once, sampled, but not less than the most of any one. What several
    share counts for each.
    """

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
    ended, together = threading.Event(), [0]
    sampler = threading.Thread(target=_sample, args=(process.pid, ended, together))
    sampler.start()
    output = process.stdout.read()  # errors are a line, so the other pipe cannot fill up
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    ended.set()
    sampler.join()
    if process.returncode:
        raise RuntimeError(f"python -m {' '.join(words)}: exit status {process.returncode}: {said.strip()}")
    return Taken(seconds, usage.ru_utime + usage.ru_stime, max(usage.ru_maxrss * 1024, together[0]), output)


def _sample(pid: int, ended: threading.Event, together: list[int]) -> None:
    """Keep in `together[0]` the most resident bytes that a process and all that it started had, until `ended`."""
    while not ended.wait(_SAMPLED_EVERY_S):
        num_bytes = 0
        try:
            for one in (parent := psutil.Process(pid), *parent.children(recursive=True)):
                num_bytes += one.memory_info().rss
        except psutil.Error:  # one ended meanwhile
            continue
        together[0] = max(together[0], num_bytes)


def median_of(taken: list[Taken]) -> float:
    """Seconds."""
    return statistics.median(one.seconds for one in taken)


def directory_bytes(directory: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in directory.glob(pattern) if path.is_file())
