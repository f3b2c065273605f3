"""Saves and loads beside training, and the time in which training waits for one after all."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from restart_trace.clock import now_ns
from restart_trace.recorder import Operation
from restart_trace.schema import MAIN_THREAD


class Background:
    """The operations in progress that the training thread does not make itself."""

    def __init__(self) -> None:
        self._workers: dict[Operation, tuple[object, ...]] = {}  # with its thread and its future
        # `future`: a weak reference to that which the thread works for, as a pool's thread keeps no result either.
        self._of_thread = threading.local()
        self._awaited: tuple[object, int] | None = None  # thread or future that training waits for, and since when (ns)
        # A wait is noted by its end or by that of the operation, whichever comes first. Reentrant for signal handlers.
        self._lock = threading.RLock()

    def works_for(self, future: object) -> None:
        """From here on this thread works for the result of `future`."""
        self._of_thread.future = weakref.ref(future)

    def began(self, operation: Operation) -> None:
        """This thread, which is not the training thread, makes the operation."""
        future = getattr(self._of_thread, "future", None)
        self._workers[operation] = threading.current_thread(), None if future is None else future()

    def given_to(self, operation: Operation, future: object) -> None:
        """Another process makes the operation, and `future` will tell its end."""
        self._workers[operation] = (future,)

    def ends(self, operation: Operation) -> None:
        """The operation is about to end, if it is one of these."""
        with self._lock:
            self._note_wait(operation, self._workers.pop(operation, ()))

    @contextmanager
    def awaited(self, what: object) -> Iterator[None]:
        """In the body the training thread waits for `what`, a thread or a future."""
        outer, self._awaited = self._awaited, (what, now_ns())
        try:
            yield
        finally:
            with self._lock:
                for operation, workers in [*self._workers.items()]:
                    self._note_wait(operation, workers)
                self._awaited = outer

    def _note_wait(self, operation: Operation, workers: tuple[object, ...]) -> None:
        """Record that training has waited for the operation until now, if it waits for one of its workers."""
        awaited = self._awaited
        if awaited is not None and any(worker is awaited[0] for worker in workers):
            start_ns = max(awaited[1], operation.start_ns)
            operation.add("wait_previous", None, start_ns, now_ns(), thread=MAIN_THREAD)
