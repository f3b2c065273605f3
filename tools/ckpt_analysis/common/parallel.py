"""Computes pieces of a frame in threads, which run at the same time since polars releases Python's lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
# More would not be faster, for each uses several threads of polars, and would hold more pieces in memory.
_WORKERS = min(4, os.cpu_count() or 1)


def map_ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Results in the order of the items, which are asked for only as far ahead as there are workers.

    A single item is computed by the calling thread.
    """
    items = iter(items)
    ahead = list(islice(items, 2))
    if len(ahead) < 2:
        yield from map(function, ahead)
        return
    with ThreadPoolExecutor(_WORKERS) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for item in chain(ahead, items):
                waiting.append(pool.submit(function, item))
                if len(waiting) > _WORKERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
