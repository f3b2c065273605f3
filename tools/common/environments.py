"""Whether a process was started with a variable: by one of their own the processes of a launch are found."""

from __future__ import annotations

import os
import time

from restart_trace.ancestors import read_text

_POLL_S = 0.0005
_ENV_START = 47  # of the fields of /proc/PID/stat after the name (proc(5))


def has_variable(pid: int, name: str, value: str) -> bool:
    """Whether the process has it in its environment; False if it has ended, or is another user's.

    For a moment of execve(2) a process shows no environment, as one often does that has just been started: it is
    looked at again.
    """
    looks = 0
    while looks < 2:  # once more: the moment may have passed between the two looks
        if text := read_text(pid, "environ"):
            return f"{name}={value}" in text.split("\0")
        if _runs_execve(pid):
            looks = 0
            time.sleep(_POLL_S)
        else:
            looks += 1
    return False


def _runs_execve(pid: int) -> bool:
    """Whether it has a program, as none has that has ended, but no place for an environment yet."""
    try:
        os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False
    fields = read_text(pid, "stat").rpartition(")")[2].split()
    return len(fields) > _ENV_START and fields[_ENV_START] == "0"
