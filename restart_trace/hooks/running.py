"""The save or load in progress: a timeline that knows the checkpoint's directory and counts its files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from restart_trace.hooks.timeline import Piece, Timeline
from restart_trace.recorder import Operation


class Running(Timeline):
    """A save or load in progress. `kind`: "save" or "load". `inferred`: as in Recorder.begin."""

    def __init__(self, operation: Operation, kind: str, *, blocking: bool = True, inferred: bool = False) -> None:
        super().__init__(operation, blocking=blocking)
        self.kind = kind
        self.inferred = inferred
        self.files: set[str] = set()  # paths that its calls have written or read
        self.opaque = False  # within a call whose inner phases are not known
        self.unfinished = False  # a helper process still writes: a later commit will end the operation
        self._directory: str | None = None
        self._between = Piece("discover" if kind == "load" else "library_call")

    @contextmanager
    def within_deepspeed(self, directory: str) -> Iterator[None]:
        """The body is DeepSpeed's part, for checkpoints in `directory`.

        Time between its known parts is `discover` in a load and `library_call` in a save, until `between` is called.
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

    def count(self, num_bytes: int, path: str | os.PathLike[str] | None = None) -> None:
        """Count `num_bytes` bytes more, and the file at `path` if it is another than before."""
        self.operation.bytes = (self.operation.bytes or 0) + num_bytes
        name = None if path is None else os.path.abspath(path)
        if name is not None and name not in self.files:
            self.files.add(name)
            self.operation.num_files = (self.operation.num_files or 0) + 1

    def moved(self, parts: set[tuple[str, int, Any]]) -> None:
        """Count parts of files that a library has written or read: (file's name, bytes, which part).

        If a library_call is open, they are its bytes.
        """
        total = sum(num_bytes for _, num_bytes, _ in parts)
        if self._open[-1].phase == "library_call":
            self._open[-1].bytes = total
        self.operation.bytes = (self.operation.bytes or 0) + total
        self.operation.num_files = (self.operation.num_files or 0) + len({name for name, _, _ in parts})

    @contextmanager
    def library_call(self, path: str | os.PathLike[str] | None = None) -> Iterator[None]:
        """The body is a call whose inner phases are not known. If `path` is given, the call writes or reads that file.

        Its bytes are the size of the file when the call returns.
        """
        if self.opaque:  # an opaque call within another
            yield
            return
        self.opaque = True
        try:
            with self.phase("library_call", file=None if path is None else self.name_of(path)) as piece:
                yield
                if path is not None and os.path.isfile(path):
                    piece.bytes = os.path.getsize(path)
                    self.count(piece.bytes, path)
        finally:
            self.opaque = False
