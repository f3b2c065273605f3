"""The exception that a measured body ends with, as spans and operations record it."""

from __future__ import annotations

from types import TracebackType


class Raised:
    """A context manager whose exception goes on; `error`: its type and text, None if the body raised nothing."""

    def __init__(self) -> None:
        self.error: str | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.error = f"{type(error).__name__}: {error}"
