"""Takes samples at intervals on a separate thread, such as traffic of bus and links during a save."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from restart_trace.clock import now_ns
from restart_trace.device_threads import device_thread
from restart_trace.probes import Probe, forgiving


class Sampler:
    """Calls `write("sample", time_ns=..., values=...)` at once and then every `interval_s` seconds, until `stop`.

    A sample that takes longer than the interval delays the next one; missed samples are not taken later. If the probe
    fails, that sample is missing, which is logged once.
    """

    def __init__(self, write: Callable[..., Any], probe: Probe, interval_s: float) -> None:
        self._write = write
        self._probe = forgiving(probe, "samples at intervals")
        self._interval_ns = round(interval_s * 1e9)
        self._stopped = threading.Event()
        self._thread = device_thread(self._run, name="restart-trace-sampler")
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples. Waits for a sample in progress, at most a second."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _run(self) -> None:
        due = now_ns()
        while not self._stopped.is_set():
            values = self._probe()
            if values is not None:
                self._write("sample", time_ns=now_ns(), values=values)
            due = max(due + self._interval_ns, now_ns())
            self._stopped.wait((due - now_ns()) / 1e9)
