"""Times of one save: of its call, and until its end, which may come while training computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Save = Callable[[Path], Callable[[], bool]]  # begins a save into a new directory; the result tells whether it is done
_ASK_EVERY_S = 0.002


def timed(save: Save, directory: Path, step: Callable[[], None]) -> dict[str, float]:
    """Save, make a step, and return `call_s` and `durable_s` when the save has ended."""
    with ThreadPoolExecutor(1) as watcher:
        began = time.monotonic()
        is_done = save(directory)
        returned = time.monotonic()
        ended = watcher.submit(_end, is_done)
        step()
        return {"call_s": returned - began, "durable_s": ended.result() - began}


def _end(is_done: Callable[[], bool]) -> float:
    while not is_done():
        time.sleep(_ASK_EVERY_S)
    return time.monotonic()
