"""What started this process: a walk up /proc, past the wrappers that a launcher put around a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def launcher_of(env: Mapping[str, str], names: tuple[str, ...]) -> int:
    """Pid of the nearest ancestor that has not all of `names` in its environment as they are in `env`.

    So that is what gave them: a wrapper between it and the rank has them, too. 0 if that cannot be seen from here.
    """
    given = {f"{name}={env[name]}" for name in names if name in env}
    pid = os.getppid()
    while pid > 0 and given <= _environment(pid):
        pid = parent_of(pid)
    return pid


def parent_of(pid: int) -> int:
    """From /proc/PID/stat, proc(5); 0 where there is no such process."""
    fields = read_text(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def read_text(pid: int, name: str) -> str:
    """A file of /proc/PID; empty if the process is gone or another user's."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/{name}").read_bytes())
    except OSError:
        return ""


def _environment(pid: int) -> set[str]:
    """Entries, NAME=VALUE, that a process was started with."""
    return set(read_text(pid, "environ").split("\0"))
