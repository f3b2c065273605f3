"""Facts about the machine, as a JSON file, before anything is installed on it: the standard library only.

What could not be observed is null, and `not_observed` says why.
"""

from __future__ import annotations

import ctypes.util
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron.fileio.host_memory import available_memory, memory_limit
from tests.gpu.files import write_json
from tools.common.machine import filesystem_of, machine

PACKAGES = ("torch", "triton", "deepspeed", "lightning", "pytorch-lightning", "transformers", "numpy", "apex", "ninja")
_DEVICE = "name,driver_version,memory.total,memory.used,pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.max"
_DEVICE += (
    ",pcie.link.width.current,clocks.max.sm,power.limit,persistence_mode,ecc.mode.current,mig.mode.current,compute_cap"
)
_PROGRAM_S = 30.0


class NotObservedError(Exception):
    """A fact that this machine does not show."""


def facts(places: list[Path]) -> dict[str, Any]:
    """All facts; `places` are directories whose file systems are told."""
    found: dict[str, Any] = machine()
    why: dict[str, str] = {}
    for name, read in _readers(places).items():
        try:
            found[name] = read()
        except (NotObservedError, OSError, ValueError) as exc:
            found[name], why[name] = None, str(exc)
    return found | {"not_observed": why}


def _readers(places: list[Path]) -> dict[str, Callable[[], Any]]:
    return {
        "nvidia_smi": nvidia_smi,
        "nvcc": lambda: printed("nvcc", "--version").splitlines()[-1],
        "gcc": lambda: printed("gcc", "--version").splitlines()[0],
        "ninja": lambda: printed("ninja", "--version"),
        "libaio": _libaio,
        "libaio_header": lambda: _present(Path("/usr/include/libaio.h")),
        "CUDA_HOME": lambda: _setting("CUDA_HOME"),
        "memory_available_bytes": available_memory,
        "memory_limit": lambda: dict(zip(("bytes", "set_by"), memory_limit(), strict=True)),
        "huge_pages": lambda: _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "clock_source": lambda: _text(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")),
        "locked_memory_limit_bytes": lambda: _limit(resource.RLIMIT_MEMLOCK),
        "open_files_limit": lambda: _limit(resource.RLIMIT_NOFILE),
        "may_drop_page_cache": lambda: os.access("/proc/sys/vm/drop_caches", os.W_OK),
        "disks": lambda: {str(place): _disk(place) for place in places},
        "packages": _packages,
    }


def printed(program: str, *words: str) -> str:
    """What a program prints. Raises NotObservedError if it is not there, fails, or prints nothing."""
    if shutil.which(program) is None:
        raise NotObservedError(f"{program} is not on PATH")
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=_PROGRAM_S)
    except subprocess.TimeoutExpired:
        raise NotObservedError(f"{program} did not end within {_PROGRAM_S:.0f} s") from None
    if done.returncode or not done.stdout.strip():
        raise NotObservedError(f"{program} {' '.join(words)}: exit status {done.returncode}: {done.stderr.strip()}")
    return done.stdout.strip()


def nvidia_smi() -> list[dict[str, str | None]]:
    """Of each device; None where the driver tells nothing ("[N/A]", "[Not Supported]"). Raises NotObservedError."""
    lines = printed("nvidia-smi", f"--query-gpu={_DEVICE}", "--format=csv,noheader").splitlines()
    rows = [[value.strip() for value in line.split(",")] for line in lines]
    return [
        {name: None if value.startswith("[") else value for name, value in zip(_DEVICE.split(","), row, strict=True)}
        for row in rows
    ]


def _libaio() -> str:
    found = ctypes.util.find_library("aio")
    if found is None:
        raise NotObservedError("the dynamic linker finds no libaio")
    return found


def _present(path: Path) -> str:
    if not path.exists():
        raise NotObservedError(f"{path} is not there")
    return str(path)


def _setting(name: str) -> str:
    if name not in os.environ:
        raise NotObservedError(f"{name} is not set")
    return os.environ[name]


def _text(path: Path) -> str:
    return path.read_text().strip()


def _chosen(path: Path) -> str:
    """The word in brackets of a kernel's list."""
    return next(word.strip("[]") for word in [*_text(path).split(), ""] if word.startswith("[") or not word)


def _limit(which: int) -> int | str:
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else soft


def _disk(place: Path) -> dict[str, Any]:
    there = next(directory for directory in (place, *place.parents) if directory.is_dir())
    usage = shutil.disk_usage(there)
    return {"filesystem": filesystem_of(there), "total_bytes": usage.total, "free_bytes": usage.free}


def _packages() -> dict[str, str | None]:
    """Versions; null for one that is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), facts([Path(word) for word in sys.argv[2:]]))
