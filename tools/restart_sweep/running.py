"""One process of a sweep: started, waited for, and ended with all that it started."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..common.environments import has_variable

MARK = "RESTART_SWEEP"  # in the environment of all processes of a sweep: its id
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GRACE_S = 20.0  # from SIGTERM to SIGKILL: drills and replays end their ranks and remove what they wrote


@dataclass(frozen=True)
class Ended:
    """`exit_code` is None if the time limit came first."""

    exit_code: int | None
    took_s: float


def run(words: list[str], environment: dict[str, str], log: Path, mark: str, limit_s: float) -> Ended:
    """Run a command to its end, at most `limit_s`; its output goes to `log`. Nothing of it is left afterwards."""
    began = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            words, env=environment | {MARK: mark}, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=_terminated_with_parent(),
        )  # fmt: skip
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        took_s = time.monotonic() - began
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        end_all(mark)
        process.wait()
    return Ended(code, took_s)


def _terminated_with_parent() -> Callable[[], None]:
    """To be called in the child: the kernel sends it SIGTERM when this process is gone, however it went."""
    libc = ctypes.CDLL(None)  # here: the child must not load anything between fork and exec

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))

    return ask


def end_all(mark: str) -> int:
    """End every process of the sweep `mark`: SIGTERM, and SIGKILL to those that do not heed it; how many there were."""
    found = _marked(mark)
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    psutil.wait_procs(found, timeout=_GRACE_S)
    while left := _marked(mark):
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1.0)
    return len(found)


def _marked(mark: str) -> list[psutil.Process]:
    return [one for one in psutil.process_iter() if has_variable(one.pid, MARK, mark)]
