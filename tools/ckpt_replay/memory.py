"""The most memory that a process and its children hold during an operation."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_SAMPLE_S = 0.02


def _status(pid: int | str, name: str) -> int:
    """A size of /proc/PID/status (proc(5)) in bytes; 0 if the process has ended."""
    with contextlib.suppress(OSError, StopIteration, IndexError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name + ":")).split()[1])
    return 0


def resident_memory() -> int:
    """Memory of this process now, bytes."""
    return _status("self", "VmRSS")


class PeakMemory:
    """`with PeakMemory() as peak:` then `peak.own_bytes` and `peak.children_bytes`.

    This process: VmHWM, the kernel's exact peak, reset through /proc/self/clear_refs; samples where that is refused.
    Children: samples of their anonymous memory, so that memory shared with this process counts once.
    """

    def __init__(self) -> None:
        self.own_bytes = 0
        self.children_bytes = 0
        self.exact = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self.exact = True
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self.own_bytes = max(self.own_bytes, _status("self", "VmHWM") if self.exact else resident_memory())

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            if not self.exact:
                self.own_bytes = max(self.own_bytes, resident_memory())
            children = sum(_status(pid, "RssAnon") for pid in _descendants(os.getpid()))
            self.children_bytes = max(self.children_bytes, children)


def _descendants(pid: int) -> list[int]:
    """Processes below `pid`, from /proc/PID/task/TID/children (proc(5)); none where the kernel lacks it."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in path.read_text().split()]
    return found + [below for child in found for below in _descendants(child)]
