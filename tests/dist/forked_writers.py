"""The processes of engine fastpersist-decoupled and of --export-hf-interval, forked from their rank instead of begun
with an interpreter of their own.

A rank of the zygote has imported all that these processes need, and that takes two or three seconds of a processor.
What such a process is given, what it does and how it ends is as ever. They begin as users begin them in
tests/unit/megatron/checkpointing/engines/test_fastpersist_process.py, tests/conformance/test_engine_processes.py, one
training of test_engines_training.py, and one of test_hf_exports.py.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from megatron.processes import helper_process

FORKED_WRITERS = "FORKED_WRITERS"  # set in ranks that fork theirs
FORKED = ("megatron.checkpointing.engines.fastpersist.process", "megatron.hf.export_process")


def install() -> None:
    """For this process: it forks the writers and exports that it would start."""
    from megatron.training import hf_exports

    for module in (helper_process, hf_exports):
        module.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": _begin})  # type: ignore[assignment]


def _begin(command: Sequence[str], **more: Any) -> ForkedInterpreter | subprocess.Popen[Any]:
    """Helpers of other engines begin as ever: they have a process group of their own."""
    is_forked = any(f"from {module} import main" in command[-1] for module in FORKED)
    return ForkedInterpreter(command, **more) if is_forked else subprocess.Popen(command, **more)


@contextmanager
def installed() -> Iterator[None]:
    """`install` for the body. What is imported here need not be by each process."""
    import deepspeed.runtime.model_checkpointing  # noqa: F401

    from megatron.training import hf_exports

    before = helper_process.subprocess
    install()
    try:
        yield
    finally:
        helper_process.subprocess = hf_exports.subprocess = before


class ForkedInterpreter:
    """What they use of subprocess.Popen([python, "-c", CODE], stdin=DEVNULL, env=..., pass_fds=... or stdout=PIPE)."""

    def __init__(
        self, command: Sequence[str], *, stdin: int, env: dict[str, str], pass_fds: Sequence[int] = (),
        stdout: int | None = None, stderr: int | None = None,
    ) -> None:  # fmt: skip
        python, option, code = command
        assert (python, option, stdin) == (sys.executable, "-c", subprocess.DEVNULL)
        assert (stdout, stderr) in ((None, None), (subprocess.PIPE, subprocess.STDOUT))
        self.returncode: int | None = None
        reading, writing = (None, None) if stdout is None else os.pipe()
        self.stdout = None if reading is None else os.fdopen(reading, "rb")
        self.pid = os.fork()
        if self.pid == 0:
            _run(code, pass_fds, env, writing)
        if writing is not None:
            os.close(writing)

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


def _run(code: str, pass_fds: Sequence[int], env: dict[str, str], output: int | None) -> NoReturn:
    """In the forked process: all that a new interpreter would not have is given up first. `output`: a pipe."""
    status = 1  # code that ends well ends the process
    try:
        os.environ.clear()
        os.environ.update(env)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
            logging.getLogger().handlers.clear()
        first = 3
        for fd in sorted(pass_fds):
            os.closerange(first, fd)
            first = fd + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        for directory in filter(None, env.get("PYTHONPATH", "").split(os.pathsep)):
            if (at_start := Path(directory, "sitecustomize.py")).is_file():
                runpy.run_path(str(at_start))
                break
        exec(code, {"__name__": "__main__"})
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
