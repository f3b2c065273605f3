"""A forked process that runs one function whenever it is asked: for what needs no process of its own each time."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
from collections.abc import Callable
from typing import Any, NoReturn

from tests.faults.injection import HANGS_S

_LENGTH = struct.Struct("Q")


class Repeated:
    """Call it for what `function` returns in that process; None if it raised, or hung for HANGS_S."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._pid: int | None = None
        self._ask = self._answers = -1

    def __call__(self) -> Any:
        self.begin()
        return self.result()

    def begin(self) -> None:
        """Let it run beside this process; `result` must follow."""
        if self._pid is None:
            self._fork()
        os.write(self._ask, b"?")

    def result(self) -> Any:
        """Wait for what `begin` has begun."""
        readable, _, _ = select.select([self._answers], [], [], HANGS_S)
        content = self._answer() if readable else b""
        if content:
            return pickle.loads(content)
        self.end()
        return None

    def _answer(self) -> bytes:
        with os.fdopen(self._answers, "rb", closefd=False, buffering=0) as pipe:
            header = pipe.read(_LENGTH.size)
            content = b""
            while header and len(content) < _LENGTH.unpack(header)[0]:
                part = pipe.read(_LENGTH.unpack(header)[0] - len(content))
                if not part:
                    return b""
                content += part
        return content

    def end(self) -> None:
        """The next call begins with a new process."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self._ask)
            os.close(self._answers)
            self._pid = None

    def _fork(self) -> None:
        asked, self._ask = os.pipe()
        self._answers, told = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._ask)
            os.close(self._answers)
            self._serve(asked, told)
        os.close(asked)
        os.close(told)

    def _serve(self, asked: int, told: int) -> NoReturn:
        try:
            while os.read(asked, 1):
                content = pickle.dumps(self._function())
                os.write(told, _LENGTH.pack(len(content)) + content)
        finally:
            os._exit(0)
