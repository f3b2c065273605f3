"""An alarm within a test whose own time limit is one, too: pytest-timeout uses the one timer that a process has."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_AT_ONCE_S = 1e-6  # 0 would disarm the timer


@contextmanager
def alarm(after_s: float, ring: Callable[[], object]) -> Iterator[None]:
    """In the body `ring` is called by the main thread once `after_s` have passed; then the alarm before goes on."""
    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, lambda *_: ring())
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:
            left_s = max(left_s - (time.monotonic() - began), _AT_ONCE_S)
            signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)
