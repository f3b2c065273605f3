"""Ends a process when its parent ends, for whatever reason: by the kernel's parent-death signal, prctl(2).

The signal is sent when the *thread* that started the process ends, and is of no use to a process whose parent was gone
before it asked for it; so the parent is compared afterwards. Linux only: elsewhere nothing is asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from megatron.processes.telling import tell
from restart_trace.ancestors import launcher_of, parent_of, read_text

logger = logging.getLogger(__name__)

# Sent to whole process groups, jobs and job steps: whether they end a training is for its ranks to say.
STOP_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SYS_PIDFD_OPEN = 434  # asm-generic/unistd.h, and the same everywhere
_TORCHRUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")  # the second one is each rank's own
_DEEPSPEED = ("CROSS_SIZE",)
# Seconds from a signal to SIGKILL, in which a rank saves (--exit-signal-handler). restart-launch sets it for its ranks,
# and a scheduler's job or a user for those of other launchers.
SHUTDOWN_TIMEOUT_VARIABLE = "MEGATRON_SHUTDOWN_TIMEOUT"
GRACE_S = 30.0  # where it is not set: as torchrun, DeepSpeed's launcher and Slurm (KillWait) have it
_END_LAUNCHERS = ("SIGUSR1", "SIGUSR2")  # torchrun and DeepSpeed's launcher handle neither
_DEEPSPEED_LAUNCHER = ("deepspeed.launcher.launch", "deepspeed/launcher/launch.py")
_watched: set[int] = set()  # by end_after_process
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


def ignore_stop_signals() -> None:
    """In the main thread of a helper process: none of STOP_SIGNALS ends it, also of those that were blocked so far."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def become_helper(parent: int) -> None:
    """In the main thread of a process that serves `parent` alone: live exactly as long.

    The signals that ask a job to end reach its helpers, too, and a rank needs them until it has saved.
    """
    ignore_stop_signals()
    end_with_parent(parent)


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """A context in which STOP_SIGNALS wait: a helper that is forked in it gets none before `become_helper`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_launcher(env: Mapping[str, str], exit_signals: Sequence[str] = ()) -> None:
    """Have a rank end with the launcher that started it: torchrun, DeepSpeed's, or Slurm's step daemon.

    `exit_signals`: names of the signals at which the rank saves before it ends (--exit-signal-handler). One that goes
    to all processes of the job may end the launcher first. The rank then gets the first of them, and the seconds of
    MEGATRON_SHUTDOWN_TIMEOUT to save (30).

    A rank that trains on without its launcher would save into the directory of the launch that replaces it. Ranks of
    megatron.launch have seen to this themselves. A process that was started in another way (by hand, under nohup) may
    outlive its parent, and nothing is done. Ends the process at once, with a message, if torchrun is gone already.
    Raises ValueError for a MEGATRON_SHUTDOWN_TIMEOUT that is no number of seconds.
    """
    grace_s = shutdown_timeout_s(env)
    grace_s = GRACE_S if grace_s is None else grace_s
    if sys.platform != "linux":
        return
    asks = signal.Signals[exit_signals[0]] if exit_signals else signal.SIGTERM
    dies_of_it = asks if set(exit_signals) & set(_END_LAUNCHERS) else None
    if "TORCHELASTIC_RUN_ID" in env:
        launcher = launcher_of(env, _TORCHRUN)
        if launcher == 0:
            logger.warning("this rank does not notice the end of torchrun, which is in another PID namespace")
        elif _adopts_orphans(launcher):
            _tell_of_orphan(launcher)
            _end()
        else:
            _end_with(launcher, dies_of_it, grace_s)
    elif "CROSS_SIZE" in env:
        launcher = launcher_of(env, _DEEPSPEED)
        if _runs(launcher, _DEEPSPEED_LAUNCHER):
            _end_with(launcher, dies_of_it, grace_s)
            runner = parent_of(launcher)
            # On another node than the one where `deepspeed` was started, the parent is a shell of ssh.
            if _runs(runner, _DEEPSPEED_RUNNER):
                _end_with(runner, asks, grace_s)
    elif "SLURM_PROCID" in env and _name(os.getppid()) == "slurmstepd":
        end_with_parent(os.getppid())


def shutdown_timeout_s(env: Mapping[str, str]) -> float | None:
    """Seconds that the launcher leaves its ranks from a signal to SIGKILL; None: nobody has said. Raises ValueError."""
    text = env.get(SHUTDOWN_TIMEOUT_VARIABLE)
    if not text:
        return None
    with contextlib.suppress(ValueError):
        seconds = float(text)
        if 0 <= seconds < float("inf"):
            return seconds
    raise ValueError(
        f"{SHUTDOWN_TIMEOUT_VARIABLE}={text}: give the seconds that the launcher leaves between a signal and SIGKILL, "
        "such as 30, or unset it"
    )


def _tell_of_orphan(adopter: int) -> None:
    with contextlib.suppress(OSError):  # the pipe may be gone with the launcher
        tell(
            f"error: TORCHELASTIC_RUN_ID is set, and no torchrun runs above this rank, but {_name(adopter)} (pid "
            f"{adopter}): torchrun has ended, and so does its rank; if none has started it, unset TORCHELASTIC_RUN_ID"
        )


def end_after_process(pid: int) -> None:
    """Have a thread end this process when the process `pid` ends. Further calls for the same process have no effect.

    For a helper that a thread of its parent started, with which the kernel's signal would come. Ends this process at
    once if the other has ended.
    """
    if sys.platform == "linux" and pid not in _watched:
        _watched.add(pid)
        _end_after_thread(pid, None, 0.0)


def _end_with(ancestor: int, asks: signal.Signals | None, grace_s: float) -> None:
    """As `end_with_parent`, with an ancestor further up, too: then a thread waits for its end.

    `asks`: the signal that asks this process to end, `grace_s` before SIGKILL; None: SIGKILL at once.
    """
    if ancestor == os.getppid() and asks is None:
        end_with_parent(ancestor)
    else:
        _end_after_thread(ancestor, asks, grace_s)


def _end_after_thread(ancestor: int, asks: signal.Signals | None, grace_s: float) -> None:
    try:
        fd = pidfd_open(ancestor)
    except ProcessLookupError:
        _end()
    except OSError as error:  # a kernel without it
        logger.warning("this process does not notice the end of process %d: %s", ancestor, error)
        return
    threading.Thread(target=_end_after, args=(fd, asks, grace_s), name="launcher-watch", daemon=True).start()


def pidfd_open(pid: int) -> int:
    """os.pidfd_open, which a Python that was built with old headers lacks, as conda's does. Raises OSError as that."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(ctypes.c_long(_SYS_PIDFD_OPEN), ctypes.c_long(pid), ctypes.c_long(0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(fd)


def _end_after(fd: int, asks: signal.Signals | None, grace_s: float) -> NoReturn:
    """Wait for the process of a pidfd to end, then end this one."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while not poller.poll():
        continue
    if asks is not None:
        os.kill(os.getpid(), asks)
        time.sleep(grace_s)
    _end()


def _end() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(128 + signal.SIGKILL)  # not reached


def _adopts_orphans(pid: int) -> bool:
    """Whether a process is no torchrun, whose agent is a Python process: then it has adopted this one, as init does.

    What cannot be seen, since it is another user's, is init or may have started this rank.
    """
    try:
        executable = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return pid == 1
    return "python" not in os.path.basename(executable) and os.path.realpath(sys.executable) != executable


def _runs(pid: int, programs: tuple[str, ...]) -> bool:
    """Whether one of the words of a process's command line is one of `programs`, or a path that ends so."""
    words = read_text(pid, "cmdline").split("\0")
    return any(word == program or word.endswith("/" + program) for word in words for program in programs)


def _name(pid: int) -> str:
    return read_text(pid, "comm").strip()
