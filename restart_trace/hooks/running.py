"""The save or load in progress: a timeline that knows the checkpoint's directory and counts its files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from restart_trace.hooks.timeline import Piece, Timeline
from restart_trace.recorder import Operation


class Running(Timeline):
    """A save or load in progress. `kind`: "save" or "load"."""

    def __init__(self, operation: Operation, kind: str) -> None:
        super().__init__(operation)
        self.kind = kind
        self.opaque = False  # within a call whose inner phases are not known
        self.unfinished = False  # a helper process still writes: a later commit will end the operation
        self._directory: str | None = None
        self._between = Piece("discover" if kind == "load" else "engine_call")

    @contextmanager
    def within_deepspeed(self, directory: str) -> Iterator[None]:
        """The body is DeepSpeed's part, for checkpoints in `directory`.

        Time between its known parts is `discover` in a load and `engine_call` in a save, until `between` is called.
        """
        self._directory = directory
        with self.within(self._between):
            yield

    def between(self, phase: str, detail: str | None = None) -> None:
        """From here on, time between DeepSpeed's known parts is this phase."""
        self.change(self._between, phase, detail)

    def name_of(self, path: str | os.PathLike[str]) -> str:
        """A file's name relative to the directory of its tag, or to the directory of the checkpoints if it is there."""
        if self._directory is None:
            return os.path.basename(path)
        relative = os.path.relpath(path, self._directory)
        return relative.partition(os.sep)[2] or relative

    def count(self, num_bytes: int) -> None:
        """Count one more file, of `num_bytes` bytes."""
        self.operation.bytes = (self.operation.bytes or 0) + num_bytes
        self.operation.num_files = (self.operation.num_files or 0) + 1

    @contextmanager
    def engine_call(self, path: str | os.PathLike[str] | None = None) -> Iterator[None]:
        """The body is a call whose inner phases are not known. If `path` is given, the call writes or reads that file.

        Its bytes are the size of the file when the call returns.
        """
        if self.opaque:  # an opaque call within another
            yield
            return
        self.opaque = True
        try:
            with self.phase("engine_call", file=None if path is None else self.name_of(path)) as piece:
                yield
                if path is not None and os.path.isfile(path):
                    piece.bytes = os.path.getsize(path)
                    self.count(piece.bytes)
        finally:
            self.opaque = False
