"""Signals by which a rank ends itself, such as SIGSEGV: no Python runs any more, and a record is there all the same.

The ranks of a start share SAVE/.generations/crash_GENERATION, sparse: a page for each, with what is known beforehand
and the iteration that is under way, and from _TRACES on room for each, into which CPython's fault handler writes the
name of the signal and the frames. So a file that ends before _TRACES tells of no crash.

SIGKILL and SIGTERM are sent by others, and have no handler here.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
import os
import re
import struct
import threading
from typing import Any

from restart_trace.regular import open_regular
from restart_trace.strict_json import parse_json

logger = logging.getLogger(__name__)

_PAGE = 1 << 16  # bytes of a rank; a multiple of every processor's pages
_TRACES = 1 << 32  # bytes: pages of 65,536 ranks
_STEP = struct.Struct("<Q")
_MAX_KNOWN = 1 << 14  # bytes
_PATIENCE_S = 0.1  # for which an iteration waits until the file has its number
# What faulthandler calls them (Modules/faulthandler.c).
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating-point exception": "SIGFPE",
    "Aborted": "SIGABRT",
}
_TOLD = re.compile(rf"Fatal Python error: ({'|'.join(_SIGNALS)})$", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(.+)", line \d+ in (.+)$', re.MULTILINE)


class CrashFile:
    """The file of a start, open in a rank. `known`: what `crash_in` returns, without the signal."""

    def __init__(self, path: str, rank: int, known: dict[str, Any]) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        head = _STEP.pack(0) + json.dumps(known).encode()
        os.pwrite(self._fd, head.ljust(mmap.PAGESIZE, b"\0"), rank * _PAGE)
        self._page = rank * _PAGE
        self._step: int | None = 0
        self._asked, self._done = threading.Event(), threading.Event()
        self._done.set()
        # Writing to a file that is mapped would make the program wait for storage that hangs, all threads with it.
        self._writer = threading.Thread(target=self._write_steps, name="crash-step", daemon=True)
        self._writer.start()
        self._is_used = not faulthandler.is_enabled()
        if not self._is_used:  # PYTHONFAULTHANDLER: it writes where its user wants it
            logger.info("Python's fault handler is in use, so crashes by a signal are not counted")
            return
        os.lseek(self._fd, _TRACES + rank * _PAGE, os.SEEK_SET)
        faulthandler.enable(self._fd, all_threads=False)

    def begin(self, step: int) -> None:
        """Iteration `step` is under way. It is in the file however this process ends, unless storage is slow: then
        training goes on without."""
        keeps_up = self._done.is_set()
        self._step = step
        self._done.clear()
        self._asked.set()
        if keeps_up:
            self._done.wait(_PATIENCE_S)

    def _write_steps(self) -> None:
        failed = False
        while True:
            self._asked.wait()
            self._asked.clear()
            step = self._step
            if step is None:
                return
            try:
                os.pwrite(self._fd, _STEP.pack(step), self._page)
            except OSError as exc:
                if not failed:
                    logger.warning("the iteration under way is not noted for a crash by a signal: %s", exc)
                failed = True
            if self._step == step:
                self._done.set()

    def close(self) -> None:
        """A crash from here on is not written."""
        if self._is_used:
            faulthandler.disable()
        self._step = None
        self._asked.set()
        self._writer.join(_PATIENCE_S)
        if not self._writer.is_alive():  # else storage hangs, and the descriptor goes with the process
            os.close(self._fd)


def crash_in(path: str) -> dict[str, Any] | None:
    """The crash that a file tells of: `known` with `step`, `signal` and `function`, which raised it; None without one.

    Of several ranks the first counts that has not aborted, since a library may abort when another rank is lost. An
    abort in a thread without Python is no crash: so NCCL's watchdog ends a rank that has lost another one.
    Raises OSError, and ValueError for what no rank has written.
    """
    with open(open_regular(path), "rb", buffering=0) as file:
        crashes: list[tuple[bool, int, str]] = []  # whether it aborted, rank, what the fault handler wrote
        size = os.fstat(file.fileno()).st_size
        for rank in range(min((size - _TRACES + _PAGE - 1) // _PAGE, _TRACES // _PAGE)):
            trace = os.pread(file.fileno(), _PAGE, _TRACES + rank * _PAGE).decode(errors="replace")
            told = _TOLD.search(trace)
            aborted = told is not None and told[1] == "Aborted"
            if told is not None and (not aborted or _FRAME.search(trace) is not None):
                crashes.append((aborted, rank, trace))
        if not crashes:
            return None
        _, rank, trace = min(crashes)
        page = os.pread(file.fileno(), _STEP.size + _MAX_KNOWN, rank * _PAGE)
    known = parse_json(page[_STEP.size :].rstrip(b"\0").decode())
    told, frame = _TOLD.search(trace), _FRAME.search(trace)
    assert told is not None
    function = "" if frame is None else f" in {frame[1]}:{frame[2]}"
    return known | {"step": _STEP.unpack_from(page)[0], "signal": _SIGNALS[told[1]], "function": function}
