"""Ends a process with the one that started it, however that went: by the kernel's parent-death signal, prctl(2).

The signal is sent when the *thread* that started the process ends, and is of no use to a process whose parent was gone
before it asked for it; so the parent is compared afterwards. Linux only: elsewhere nothing is asked for.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_DEEPSPEED_LAUNCHER = ("deepspeed.launcher.launch", "deepspeed/launcher/launch.py")
_DEEPSPEED_RUNNER = ("deepspeed.launcher.runner", "deepspeed/launcher/runner.py", "deepspeed", "ds")


def end_with_parent(expected: int | None = None) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends.

    `expected`: the parent's pid, where it is known: if that is gone already, this process ends at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if expected is not None and os.getppid() != expected:
        _end()


def end_with_launcher(env: Mapping[str, str]) -> None:
    """Have a rank end with the launcher that started it: torchrun, DeepSpeed's, or Slurm's step daemon.

    A rank that trains on without its launcher would save into the directory of the launch that replaces it. Ranks of
    megatron.launch have seen to this themselves. A process that was started in another way (by hand, under nohup) may
    outlive its parent, and nothing is done. Ends the process at once if its launcher is gone already.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        launcher = _nearest_ancestor_without("TORCHELASTIC_RUN_ID")
        # torchrun's agent is a Python process of this user; init, or whatever else adopts orphans, is not.
        if not _is_python(launcher):
            _end()
        _end_with(launcher)
    elif "CROSS_SIZE" in env:
        launcher = _nearest_ancestor_without("CROSS_SIZE")
        if _runs(launcher, _DEEPSPEED_LAUNCHER):
            _end_with(launcher)
            runner = _parent_of(launcher)
            # On another node than the one where `deepspeed` was started, the parent is a shell of ssh.
            if _runs(runner, _DEEPSPEED_RUNNER):
                _end_with(runner)
    elif "SLURM_PROCID" in env and _name(os.getppid()) == "slurmstepd":
        end_with_parent(os.getppid())


def _nearest_ancestor_without(variable: str) -> int:
    """Pid of the launcher: what it starts (a rank, or a wrapper around one) has `variable` in its environment."""
    pid = os.getppid()
    while pid > 1 and variable in _environment_names(pid):
        pid = _parent_of(pid)
    return pid


def _end_with(ancestor: int) -> None:
    """As `end_with_parent`, with an ancestor further up, too: then a thread waits for its end."""
    if ancestor == os.getppid():
        end_with_parent(ancestor)
        return
    try:
        fd = os.pidfd_open(ancestor)
    except ProcessLookupError:
        _end()
    except OSError as error:  # a kernel without it
        logger.warning("this rank does not notice the end of its launcher (pid %d): %s", ancestor, error)
        return
    threading.Thread(target=_end_after, args=(fd,), name="launcher-watch", daemon=True).start()


def _end_after(fd: int) -> NoReturn:
    """Wait for the process of a pidfd to end, then end this one."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while not poller.poll():
        continue
    _end()


def _end() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(128 + signal.SIGKILL)  # not reached


def _is_python(pid: int) -> bool:
    """Whether a process runs a Python interpreter; not to be seen of another user's, as init is to an ordinary one."""
    try:
        executable = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return False
    return "python" in os.path.basename(executable) or os.path.realpath(sys.executable) == executable


def _runs(pid: int, programs: tuple[str, ...]) -> bool:
    """Whether one of the words of a process's command line is one of `programs`, or a path that ends so."""
    words = _read(pid, "cmdline").split("\0")
    return any(word == program or word.endswith("/" + program) for word in words for program in programs)


def _environment_names(pid: int) -> set[str]:
    return {entry.partition("=")[0] for entry in _read(pid, "environ").split("\0")}


def _name(pid: int) -> str:
    return _read(pid, "comm").strip()


def _parent_of(pid: int) -> int:
    """From /proc/PID/stat, proc(5); 0 where there is no such process."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _read(pid: int, name: str) -> str:
    """A file of /proc/PID; empty if the process is gone or another user's."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/{name}").read_bytes())
    except OSError:
        return ""
