"""Sends a second request if the first takes longer than nearly all requests like it; the first answer counts.

One request in a hundred may take a store ten times as long as the others, and a load waits for the slowest of its
thousands. (Jeffrey Dean and Luiz André Barroso, "The Tail at Scale", CACM 2013: hedged requests.)
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable

_REMEMBERED = 100
_LEAST = 20  # durations that must be known
_PERCENTILE = 95
_TIMES_MEDIAN = 2.0  # where all take about as long, nothing is slow


class GivenUpError(Exception):
    """Another attempt has already received the answer."""


class Destination:
    """Memory that receives an answer piece by piece, until the answer is given up."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.given_up = threading.Event()
        self._lock = threading.Lock()

    def put(self, at: int, piece: bytes) -> None:
        """Raises GivenUpError once it is given up; nothing is written then."""
        with self._lock:
            if self.given_up.is_set():
                raise GivenUpError
            self.view[at : at + len(piece)] = piece

    def give_up(self) -> None:
        with self._lock:
            self.given_up.set()


Request = Callable[[Destination], None]


class Hedging:
    """For requests of one kind and about one size, from any thread. `hedged`: second requests until now."""

    def __init__(self) -> None:
        self.hedged = 0
        self._lock = threading.Lock()
        self._durations: deque[float] = deque(maxlen=_REMEMBERED)  # s

    def fill(self, into: memoryview, request: Request) -> None:
        """Have `request` fill `into`, or a second one if it is late. Raises what it raises, if both do."""
        begun = time.monotonic()
        patience_s = self._patience_s()
        if patience_s is None:
            request(Destination(into))
        else:
            self._fill(into, request, patience_s)
        with self._lock:
            self._durations.append(time.monotonic() - begun)

    def _fill(self, into: memoryview, request: Request, patience_s: float) -> None:
        ended: queue.SimpleQueue[_Attempt] = queue.SimpleQueue()
        attempts = [_Attempt(request, into, ended)]
        try:
            won = ended.get(timeout=patience_s)
        except queue.Empty:
            with self._lock:
                self.hedged += 1
            attempts.append(_Attempt(request, memoryview(bytearray(len(into))), ended))
            won = ended.get()
            if won.error is not None:  # the other may have more luck
                won = ended.get()
        for attempt in attempts:
            attempt.destination.give_up()
        if won.error is not None:
            raise won.error
        if won is not attempts[0]:
            into[:] = won.destination.view

    def _patience_s(self) -> float | None:
        with self._lock:
            known = sorted(self._durations)
        if len(known) < _LEAST:
            return None
        return max(known[len(known) * _PERCENTILE // 100], _TIMES_MEDIAN * statistics.median(known))


class _Attempt:
    """A request on a thread of its own. `error`: what it raised, once it is in `ended`."""

    def __init__(self, request: Request, view: memoryview, ended: queue.SimpleQueue[_Attempt]) -> None:
        self.destination = Destination(view)
        self.error: BaseException | None = None
        self._request = request
        self._ended = ended
        threading.Thread(target=self._run, name="object-read", daemon=True).start()

    def _run(self) -> None:
        try:
            self._request(self.destination)
        except BaseException as exc:  # told by who waits for it
            self.error = exc
        self._ended.put(self)
