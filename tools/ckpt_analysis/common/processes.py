"""Divides work among processes. For work that holds Python's lock most of the time, where threads do not help."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from .errors import CouldNotRunError
from .parallel import map_ahead

Item = TypeVar("Item")
Result = TypeVar("Result")


def processes_for(num_bytes: int, from_bytes: int) -> int:
    """How many processes should read `num_bytes` of trace files: one for each core that this one may use.

    1 below `from_bytes`, where starting processes takes longer than they save.
    """
    if num_bytes < from_bytes:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_in_processes(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int, chunk: int = 1
) -> Iterator[Result]:
    """Results in the order of the items, which `processes` take `chunk` at a time; 1: this process's threads do it all.

    `function` and items are pickled. Raises CouldNotRunError if a process is killed.
    """
    if processes == 1:
        yield from map_ahead(function, items)
        return
    # spawn: forking a process that polars has threads in may hang.
    with ProcessPoolExecutor(processes, get_context("spawn"), _start) as pool:
        try:
            yield from pool.map(function, items, chunksize=chunk)
        except BrokenProcessPool:
            raise CouldNotRunError(
                "a process that read trace files was killed, as it is when memory runs out: free some, or analyse "
                "the trace on a larger machine"
            ) from None


def _start() -> None:
    """In a new process, before it imports polars: the processes are as many as there are cores."""
    os.environ["POLARS_MAX_THREADS"] = "1"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that started it ends it
