"""Threads that work on the device of the thread that makes them.

The current device belongs to a thread, and a new thread's is number 0. On a host with several visible devices, a thread
that queues copies, waits for events or frees tensors there makes a context on device 0 beside the rank's own: about
half a gigabyte, and the time to create it. So each thread that may call the driver, itself or through a library, is
made here, or is one of an executor with this module's initializer. A thread that only reads and writes files, sockets
or pipes needs neither; tests/unit/test_threads.py lists those threads with the reason.

To select a device is not to have a context: some versions of torch do nothing if the device is 0, and a thread that
calls the driver directly enters the context itself (megatron.fileio.pinned_memory). Standard library only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from restart_trace.devices import accelerator_in_use


def current_device() -> int | None:
    """The index of the calling thread's device; None if this process has not initialised an accelerator of torch's.

    Initialises nothing: a process that has not may be one that forks ranks.
    """
    return None if accelerator_in_use() is None else int(sys.modules["torch"].accelerator.current_device_index())


def device_selector() -> Callable[[], None]:
    """A function that selects, on the thread that calls it, the device of the thread that calls this: an executor's
    `initializer`."""
    device = current_device()

    def select() -> None:
        if device is not None:
            sys.modules["torch"].accelerator.set_device_index(device)

    return select


def device_thread(
    target: Callable[..., object], *, name: str, args: Sequence[Any] = (), daemon: bool = True
) -> threading.Thread:
    """A thread, not started yet, that runs `target(*args)` with the device of the thread that calls this."""
    select = device_selector()

    def run() -> None:
        select()
        target(*args)

    return threading.Thread(target=run, name=name, daemon=daemon)
