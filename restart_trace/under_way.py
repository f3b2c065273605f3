"""The work that the threads of this process have in progress, so that a watcher can report what a wait is for.

    with UnderWay(RANKS, "a training step"):
        ...

An entry costs two changes of a dict and no system call; its words are joined only when they are read. Every span and
every operation of a recorder is an entry, even if the recorder records nothing.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from typing import NamedTuple

from restart_trace.clock import now_ns

# What the work in progress depends on
OWN_WORK = "own work"  # only on this process: it may take any time
RANKS = "ranks"  # on the other ranks
STORAGE = "storage"  # on one call of the file system
READING = "reading"  # on all reads of a rank in a load

_entries: dict[int, Entry] = {}  # by number, that is, in the order in which they began
_numbers = itertools.count()


class Entry(NamedTuple):  # made for each block of a file: a frozen dataclass costs three times as much
    """Work in progress. `words` describe it; for a call of the file system they include the file or its descriptor."""

    depends_on: str
    words: tuple[str | int | None, ...]
    since_ns: int
    thread: int  # threading.get_ident(); 0: of no single thread, such as an operation on which several threads work

    @property
    def seconds(self) -> float:
        return (now_ns() - self.since_ns) / 1e9

    @property
    def text(self) -> str:
        """The words as one phrase, with a descriptor replaced by the name of its file."""
        return " ".join(_file_of(word) if isinstance(word, int) else word for word in self.words if word is not None)


def _file_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"descriptor {fd}"


def begin(depends_on: str, *words: str | int | None, thread: int | None = None) -> int:
    """Note that work begins. Returns a number for `end`, which any thread may call.

    `thread`: 0 for no single thread.
    """
    number = next(_numbers)
    _entries[number] = Entry(depends_on, words, now_ns(), threading.get_ident() if thread is None else thread)
    return number


def end(number: int) -> None:
    """Note that the work is done; further calls have no effect."""
    _entries.pop(number, None)


def clear() -> None:
    """Forget all work: the process begins anew, and what an exception has ended is not in progress any more."""
    _entries.clear()


class UnderWay:  # a generator would cost twice as much
    """Context manager: notes the body as work in progress, described by `words`."""

    __slots__ = ("_depends_on", "_number", "_words")

    def __init__(self, depends_on: str, *words: str | int | None) -> None:
        self._depends_on, self._words = depends_on, words

    def __enter__(self) -> None:
        self._number = begin(self._depends_on, *self._words)

    def __exit__(self, *_: object) -> None:
        end(self._number)


def entries() -> Mapping[int, Entry]:
    """All work in progress, in the order in which it began."""
    return _entries.copy()  # atomic, since other threads change it
