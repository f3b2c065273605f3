"""The process of engine fastpersist-decoupled, forked from its rank instead of begun with an interpreter of its own.

A rank of the zygote has imported all that this process needs, and that takes three seconds of a processor. What the
process is given, what it does and how it ends is as ever. tests/unit/megatron/checkpointing/engines/
test_fastpersist_process.py, tests/conformance/test_engine_processes.py and one training of test_engines_training.py
begin it as users do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NoReturn

from megatron.checkpointing.engines.fastpersist import decoupled_engine

FORKED_WRITERS = "FORKED_WRITERS"  # set in ranks that fork theirs


def install() -> None:
    """For this process: its engines fork what they would start."""
    decoupled_engine.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=ForkedInterpreter, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


@contextmanager
def installed() -> Iterator[None]:
    """`install` for the body. What is imported here need not be by each process."""
    import deepspeed.runtime.model_checkpointing  # noqa: F401

    before = decoupled_engine.subprocess
    install()
    try:
        yield
    finally:
        decoupled_engine.subprocess = before


class ForkedInterpreter:
    """What the engine uses of subprocess.Popen([python, "-c", CODE], stdin=DEVNULL, pass_fds=..., env=...)."""

    def __init__(self, command: Sequence[str], *, stdin: int, pass_fds: Sequence[int], env: dict[str, str]) -> None:
        python, option, code = command
        assert (python, option, stdin) == (sys.executable, "-c", subprocess.DEVNULL)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(code, pass_fds, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the checkpoint writer", timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _run(code: str, pass_fds: Sequence[int], env: dict[str, str]) -> NoReturn:
    """In the forked process: all that a new interpreter would not have is given up first."""
    try:
        os.environ.clear()
        os.environ.update(env)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        first = 3
        for fd in sorted(pass_fds):
            os.closerange(first, fd)
            first = fd + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        exec(code, {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # code that ends well has ended the process
