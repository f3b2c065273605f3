"""Whether this host is fit for ranks: its memory, a disk and its GPUs, each tried briefly.

An agent asks before it joins a launch, again before it joins once more, and before ranks are started again where one of
its own has failed, as GEMINI's agents do (Wang et al., SOSP 2023, section 6): a host with a fault would fail the next
start as well. Standard library only.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_MEMORY = 16 << 20  # bytes that are filled and compared
_FILE = 1 << 20
_GPUS_S = 30.0  # a driver that has lost a device may not answer
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
