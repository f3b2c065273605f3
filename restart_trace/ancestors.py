"""Finds the launcher that started this process, by /proc, above any wrappers that the launcher put around a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def launcher_of(env: Mapping[str, str], names: tuple[str, ...]) -> int:
    """Pid of the nearest ancestor whose environment lacks one of `names` or has another value of it than `env`.

    That ancestor set these variables, since a wrapper between it and the rank has them, too. 0 if it cannot be found.
    """
    given = {f"{name}={env[name]}" for name in names if name in env}
    pid = os.getppid()
    while pid > 0 and given <= _environment(pid):
        pid = parent_of(pid)
    return pid


def parent_of(pid: int) -> int:
    """Pid of the parent, from /proc/PID/stat (proc(5)); 0 if there is no such process."""
    fields = read_text(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def read_text(pid: int, name: str) -> str:
    """A file of /proc/PID; empty if the process is gone or another user's."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/{name}").read_bytes())
    except OSError:
        return ""


def _environment(pid: int) -> set[str]:
    """The environment that a process was started with, as NAME=VALUE entries."""
    return set(read_text(pid, "environ").split("\0"))
