"""Hooks of how a program waits for work of its other threads: Thread.join, and the results of futures."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import thread as pools
from contextlib import AbstractContextManager

from restart_trace.hooks.guard import Call, wrap
from restart_trace.hooks.session import Session


class Waits:
    """Around the calls of the training thread: it may wait for a save or load of the background."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def join(self, call: Call) -> AbstractContextManager[None] | None:
        """Around Thread.join."""
        return self._session.background.awaited(call.args[0]) if self._session.is_training_thread() else None

    def result(self, call: Call) -> AbstractContextManager[None] | None:
        """Around Future.result and Future.exception."""
        return None if call.args[0].done() else self.join(call)

    def work(self, call: Call) -> None:
        """Before a thread of a pool begins with what was submitted to it."""
        self._session.background.works_for(call.args[0].future)


def hook(session: Session) -> None:
    """Hook threading and concurrent.futures, which torch has imported."""
    waits = Waits(session)
    wrap(threading.Thread, "join", waits.join)
    wrap(Future, "result", waits.result)
    wrap(Future, "exception", waits.result)
    wrap(pools._WorkItem, "run", waits.work)
