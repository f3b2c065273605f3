"""One thread within one operation: at any time it is in one phase, the innermost open one.

A phase that an inner one interrupts is recorded in pieces, so that no time counts twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from restart_trace.clock import now_ns
from restart_trace.raised import Raised
from restart_trace.recorder import Operation


@dataclass
class Piece:
    """An open phase. Its bytes are recorded with its last piece."""

    phase: str
    detail: str | None = None
    file: str | None = None
    bytes: int | None = None


class Timeline:
    """Cuts the time of a thread in `operation` into spans."""

    def __init__(self, operation: Operation, *, blocking: bool = True) -> None:
        """`blocking`: whether training waits for this thread. `since_ns`: end of the latest piece."""
        self.operation = operation
        self.blocking = blocking
        self._open: list[Piece] = []
        self.since_ns = operation.start_ns

    @contextmanager
    def phase(self, phase: str, detail: str | None = None, file: str | None = None) -> Iterator[Piece]:
        """The body is this phase, except for the phases within it."""
        piece = Piece(phase, detail, file)
        if self._open and self._open[-1] == piece:  # a part of the same phase
            yield self._open[-1]
            return
        with self.within(piece):
            yield piece

    @contextmanager
    def within(self, piece: Piece) -> Iterator[None]:
        """As `phase`, for a piece that may become another phase by `change`."""
        self._cut()
        self._open.append(piece)
        raised = Raised()
        try:
            with raised:
                yield
        finally:
            self._cut(last=piece, error=raised.error)
            self._open.pop()

    def change(self, piece: Piece, phase: str, detail: str | None = None) -> None:
        """Let the open `piece` be another phase from now on."""
        if (piece.phase, piece.detail) != (phase, detail):
            if self._open[-1] is piece:  # otherwise its time was recorded when the inner phase began
                self._cut()
            piece.phase, piece.detail = phase, detail

    @contextmanager
    def apart(self) -> Iterator[int]:
        """The body records its own spans, which share one window. Yields the begin of the window, ns."""
        self._cut()
        try:
            yield self.since_ns
        finally:
            self.since_ns = now_ns()

    def interrupted(self, phase: str, start_ns: int, end_ns: int) -> None:
        """Record `phase`, which has just ended, as an interruption of the open phase."""
        start_ns = max(start_ns, self.since_ns)  # phases within it are already recorded
        if end_ns > start_ns:
            self._cut(at_ns=start_ns)
            self.add(phase, None, start_ns, end_ns)
            self.since_ns = end_ns

    def skip(self) -> None:
        """Leave out the time since the last phase, which was not part of this operation."""
        self.since_ns = now_ns()

    def _cut(self, last: Piece | None = None, error: str | None = None, at_ns: int | None = None) -> None:
        """Record the time since the last cut as a piece of the innermost phase; its last piece if it is `last`."""
        now = at_ns or now_ns()
        innermost = self._open[-1] if self._open else None
        if innermost is not None:
            self.add(
                innermost.phase, innermost.detail, self.since_ns, now, file=innermost.file,
                num_bytes=innermost.bytes if innermost is last else None, error=error,
            )  # fmt: skip
        self.since_ns = now

    def add(self, phase: str, detail: str | None, start_ns: int, end_ns: int, **fields: Any) -> None:
        """Record a span that the caller has measured; `fields` as in Operation.add."""
        self.operation.add(phase, detail, start_ns, end_ns, blocking=self.blocking, **fields)
