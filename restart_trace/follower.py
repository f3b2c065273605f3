"""Starts the process that sends a job's spans to an OpenTelemetry collector: `ckpt-analysis follow`.

It reads the trace files and nothing else of the job, so that the job does not wait for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

from restart_trace.collector import INSTALL, PACKAGES, endpoint_refusal

_MODULE = "megatron_restart_tools.ckpt_analysis"  # of the distribution that this package is a part of
_PLACE = str(Path(__file__).resolve().parents[1])  # of this package and the module
_LONGEST_END_S = 5.0
_LOWEST_PRIORITY = 19  # of the processor: the job comes first


def refusal(endpoint: str) -> str:
    """Why nothing can be sent to this endpoint, with the fix; "" if it can."""
    if wrong := endpoint_refusal(endpoint):
        return wrong
    for module, package in PACKAGES.items():
        if not _is_there(module):
            return f"{package} is not installed (the extra otlp): {INSTALL}, or drop it"
    return ""


def start_follower(trace_dir: Path, endpoint: str, cycles: str, pid: int) -> subprocess.Popen[bytes]:
    """Start it for these cycles (as --cycles has them), until the process `pid` has ended or it gets SIGTERM.

    It is in a session of its own, which the signals to the job do not reach. SIGTERM waits until it can be handled: the
    process starts with that blocked, and `follow` lets it through. Raises OSError if it cannot be started.
    """
    path = os.pathsep.join(filter(None, (_PLACE, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", _MODULE, "follow", str(trace_dir.absolute()), "--otlp", endpoint]
    command += ["--cycles", cycles, "--while-pid", str(pid)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        started = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path}, cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with contextlib.suppress(OSError):  # where a sandbox refuses it, the priority is the job's
        os.setpriority(os.PRIO_PROCESS, started.pid, _LOWEST_PRIORITY)
    return started


def end_follower(follower: subprocess.Popen[bytes]) -> None:
    """Say that the job has ended, and wait for a few seconds: a container ends with the process that calls this."""
    follower.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        follower.wait(_LONGEST_END_S)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
