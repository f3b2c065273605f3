"""Whether this host is fit for ranks: its memory, a disk and its GPUs, each tried briefly.

An agent asks before it joins a launch, again before it joins once more, now and then while it waits as a spare, and
before ranks are started again where one of its own has failed, as GEMINI's agents do (Wang et al., SOSP 2023, section
6): a host with a fault would fail the next start as well. Standard library only.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron.processes.parent_process import end_with_parent
from megatron.processes.process_name import name_process

PROCESS_NAME = "health-check"  # as ps shows it

_MEMORY = 16 << 20  # bytes that are filled and compared
_FILE = 1 << 20
_GPUS_S = 30.0  # a driver that has lost a device may not answer
_CHECK_S = 60.0  # for all of a check
_MORE = 0.1  # of it: for one that is seen to be late
_FIT = "looked:"  # what a check that came to its end says first
_QUERY = ("--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader,nounits")


def what_is_wrong(directory: str, devices: Path = Path("/dev")) -> str | None:
    """What keeps this host from being used, in words; None: it is fit. `directory`: on the disk that is tried."""
    return _of_memory() or _of_disk(directory) or _of_gpus(devices)


def _of_memory() -> str | None:
    pattern = os.urandom(1 << 20)
    try:
        with mmap.mmap(-1, _MEMORY) as memory:
            for start in range(0, _MEMORY, len(pattern)):
                memory[start : start + len(pattern)] = pattern
            for start in range(0, _MEMORY, len(pattern)):
                if memory[start : start + len(pattern)] != pattern:
                    return "its memory does not hold what is written to it"
    except (OSError, MemoryError) as error:
        return f"{_MEMORY >> 20} MiB of memory cannot be had: {error}"
    return None


def _of_disk(directory: str) -> str | None:
    content = os.urandom(_FILE)
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(content)
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else the page cache answers
            if os.pread(file.fileno(), _FILE, 0) != content:
                return f"{directory} does not hold what is written to it"
    except OSError as error:
        return f"{directory} cannot be written to: {error.strerror or error}"
    return None


def _of_gpus(devices: Path) -> str | None:
    """By the driver's own tool, where there are devices of NVIDIA's and the tool is there; no CUDA is initialised."""
    tool = shutil.which("nvidia-smi")
    if tool is None or not any(devices.glob("nvidia[0-9]*")):
        return None
    try:
        done = subprocess.run([tool, *_QUERY], capture_output=True, text=True, timeout=_GPUS_S, check=False)
    except subprocess.TimeoutExpired:
        return f"nvidia-smi does not answer within {_GPUS_S:g} s"
    if done.returncode:
        return f"nvidia-smi ended with {done.returncode}: {(done.stdout + done.stderr).strip()[:200]}"
    for line in done.stdout.splitlines():
        index, _, errors = (word.strip() for word in line.partition(","))
        if errors.isdigit() and int(errors):  # "[N/A]" where a device has no ECC
            return f"GPU {index} has {errors} uncorrected memory errors"
    return None


class RepeatedCheck:
    """Checks this host every `interval_s`, each time in a process that is forked for it: the caller has one thread.

    The caller goes on meanwhile, whatever hangs. `look` says what is wrong, or None. SIGCHLD tells of the end.
    """

    def __init__(self, interval_s: float, look: Callable[[], str | None]) -> None:
        self._interval_s = interval_s
        self._look = look
        self._pid: int | None = None  # while it runs, or is yet to be reaped
        self._reader = -1
        self._is_late = False
        self.next_at = 0.0  # when it is to begin, or else to be over (monotonic, s)
        self.postpone()

    def postpone(self) -> None:
        """The next one begins an interval from now at the earliest."""
        if self._pid is None:
            self.next_at = time.monotonic() + self._interval_s

    @property
    def due(self) -> bool:
        return self._pid is None and time.monotonic() >= self.next_at

    def begin(self, in_child: Callable[[], object]) -> None:
        """Fork it; in it `in_child` is called first."""
        self._reader, writer = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._tell(parent, writer, in_child)
        os.close(writer)
        self._is_late, self.next_at = False, time.monotonic() + _CHECK_S

    def result(self) -> str | None:
        """What is wrong, once it is known; None otherwise. Waits for nothing."""
        if self._pid is None:
            return None
        if os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            if time.monotonic() < self.next_at:
                return None
            if not self._is_late:  # this host may have stood still, and the check with it
                self._is_late, self.next_at = True, time.monotonic() + _CHECK_S * _MORE
                return None
            os.kill(self._pid, signal.SIGKILL)  # what waits for a disk ends later, or never
            self.next_at = time.monotonic() + _CHECK_S
            return f"its memory, disk and GPUs could not be tried within {_CHECK_S:g} s"
        self._pid = None
        self.postpone()
        with open(self._reader, "rb") as told:
            verdict = told.read().decode()
        return verdict.removeprefix(_FIT) or None if verdict else "its check ended without a result"

    def _tell(self, parent: int, writer: int, in_child: Callable[[], object]) -> NoReturn:
        """In the forked process."""
        try:
            end_with_parent(parent)
            in_child()
            os.setsid()  # the terminal's signals are for the agent to pass on
            name_process(PROCESS_NAME)
            os.write(writer, (_FIT + (self._look() or "")).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)  # nothing of the forked agent may run here
